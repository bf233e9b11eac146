"""What a run is told: its settings, and where they come from."""
