"""What a run leaves on disk and shows on screen. Reads the results of steps and makes no training decision."""
