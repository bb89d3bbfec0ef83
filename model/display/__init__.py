"""What people see of a run: log lines, progress, screen, plots, trackers, and the words in two languages."""
