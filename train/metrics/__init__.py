"""What is measured: the log and its pictures, evaluation, throughput, profiles."""
