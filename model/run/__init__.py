"""What a run leaves on disk: its directory, journal, checkpoints and state."""
