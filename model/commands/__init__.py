"""Options to a run, and a run to action: train, plan, test and doctor."""
