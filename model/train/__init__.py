"""One optimizer step after another, and their evaluation. Knows nothing of run directories, the journal or the console.

step is the loop and hands out a StepResult a step; gradients is one rank's attempt at a step, without collectives;
loader prepares the next step's micro-batches on the host; cuda_graphs records a step for each bucket.
optim holds the optimizers, lr_schedule the learning rate at any position; spike_guard says which steps are left out.
fixed_shards gives the same bits on any number of CPU processes (exact=True).
evaluate measures loss, BLEU and chrF; dry_run measures the plan on the device before the first step,
which footprint predicted from the options, the network and the data.
"""
