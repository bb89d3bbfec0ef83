"""The training loop and evaluation. Knows nothing of run directories, the journal or the console.

step is the loop: it yields a StepResult per step. gradients computes one rank's gradients, without collectives;
weighted_loss is the network and the objective on one micro-batch. objectives/ says what a step's loss is.
examples are the rows of a token store as an objective presents them; derive computes their columns that need a model.
loader packs the next step's micro-batches on the host; cuda_graphs records one step per bucket, and the update.
commit ends a step: sum over ranks, check, update; reduction is that sum. optim has what the optimizers share, as has
flat_optimizer; adamw, adamw_rms and muon are three of them, orthogonal the iteration of muon. run_length says how long
a run is; lr_schedule is the rate at any position.
spike_guard decides which steps to skip.
evaluate measures loss, BLEU and chrF. footprint predicts the memory of a run from its options, network and data;
dry_run measures it on the device before the first step.
"""
