"""The training loop and evaluation. Knows nothing of run directories, the journal or the console.

step is the loop: it yields a StepResult per step. gradients computes one rank's gradients, without collectives.
loader packs the next step's micro-batches on the host; cuda_graphs records one step per bucket.
optim holds the optimizers, lr_schedule the learning rate at any position; spike_guard decides which steps to skip.
fixed_shards gives the same bits on any number of CPU processes (exact=True).
evaluate measures loss, BLEU and chrF. footprint predicts the memory of a run from its options, network and data;
dry_run measures it on the device before the first step.
"""
