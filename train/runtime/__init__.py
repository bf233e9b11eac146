"""What a run runs on: plan, strategy, devices, workers, and how it stops."""
