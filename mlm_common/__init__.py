"""What all stages stand on: errors, settings, command line, storage, the Hub, worker processes, progress, figures."""
