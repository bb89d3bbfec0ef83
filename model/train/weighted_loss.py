"""The network and the objective on one micro-batch of a step."""


def weighted_loss(model, objective, batch, chunk_tokens, scales):
    """The batch's part of the step's loss, a scalar to call backward on; adds its metrics to the model's `flat.sums`.

    `scales` are two tensors on the batch's device: a factor for each loss sum, and for each metric sum.
    """
    sums, metrics = objective.losses(model, batch, chunk_tokens)
    loss_scales, metric_scales = scales
    model.flat.sums[: len(metrics)].add_(metrics * metric_scales)
    return (sums * loss_scales).sum()


def means_by_name(names, means):
    """{name: mean} of an objective's metrics; means of one name, which have divisors of their own, are added."""
    named = {}
    for name, mean in zip(names, means, strict=True):
        named[name] = named[name] + mean if name in named else mean
    return named
