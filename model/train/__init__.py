"""One step, and what it is for: gradients, optimizers, objectives, evaluation."""
