"""The commands of train_low_mem.py up to the training loop."""
