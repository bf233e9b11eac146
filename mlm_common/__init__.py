"""What all stages stand on: errors, command line, storage, the Hub's client, worker processes, progress, figures."""
