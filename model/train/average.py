"""A running average of the trained weights, which often does better than those that the last steps left."""

from contextlib import contextmanager

import torch


class WeightAverage:
    """The average of a FlatParams' trained weights over the steps so far, in their flat layout.

    Step t moves it towards the weights by 1 - (1 - 1/t)^(1/share - 1): the power-function average of Karras et al. 2024
    (arXiv 2312.02696, section 3.1), in which the weights are `share` of the steps old on average, in a short run as in
    a long one. A share of 1/2 is the mean of all steps. It is a function of the step alone: the first steps count less
    and less without a warm-up, and the run's length may change.
    """

    def __init__(self, flat, share):
        self.flat, self.share, self.values = flat, share, flat.masters.clone()
        self.moved = torch.zeros((), device=self.values.device)  # how far the step moves it

    @torch.no_grad()
    def update(self, step, scale):
        """Follow the weights after the step of this number, unless the `scale` of its update is not above 0.

        `scale` is a tensor on the device, which the host does not wait for.
        """
        self.moved.fill_(1 - (1 - 1 / step) ** (1 / self.share - 1)).mul_(scale > 0)
        self.values.lerp_(self.flat.masters, self.moved)

    def restart(self):
        """Begin with the weights as they are."""
        self.values.copy_(self.flat.masters)

    def tensors(self):
        """The average of each trained parameter, in their order."""
        parts = self.values.split(self.flat.trained_sizes)
        return [part[: p.numel()].view(p.shape) for p, part in zip(self.flat.trained, parts, strict=True)]

    @contextmanager
    def in_place_of_weights(self):
        """Context manager: inside, the model has the average as its weights, and afterwards its own, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self):
        """Exchange average and weights where they lie, as captured steps need; without memory, so it cannot run out."""
        weights, values = (x.view(torch.int32) for x in (self.flat.masters, self.values))
        for one, other in ((weights, values), (values, weights), (weights, values)):
            one.bitwise_xor_(other)
