"""The training loop and evaluation. Knows nothing of run directories, the journal or the console."""
