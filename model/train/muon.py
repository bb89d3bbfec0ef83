"""The optimizer Muon: orthogonalised momentum for the layers' matrices."""

import math
from itertools import groupby, islice

import torch

from model.nn.flat_params import runs_kernels
from model.nn.weight_parts import whole_ends
from model.train.adamw_rms import RMS_FLOOR, RMSScaledAdamW
from model.train.flat_optimizer import FlatOptimizer
from model.train.orthogonal import is_long, orthogonal, orthogonalise_

# Matrix elements that are updated together; the temporaries take 8 bytes per element. 64 matrices of 768 x 768: with 40
# in place of chatlm's 60, a quarter more of the GPU is idle in the last wave of tiles.
BATCH_NUMBERS = 9 * 2**22


class Muon(FlatOptimizer):
    """Muon for the layers' matrices, RMSScaledAdamW for the other weights.

    The update of a matrix is its orthogonalised momentum, with all singular values near 1 (Jordan et al. 2024,
    github.com/KellerJordan/Muon), times 0.2 sqrt(longer side), which matches the RMS of Adam's update (Liu et al. 2025,
    arXiv 2502.16982), times max(1e-3, RMS of the matrix) as in RMSScaledAdamW; with weight decay it is theirs at the
    learning rate `lr` times that RMS. Matrices of the same shape are updated as one batch.
    """

    fields = RMSScaledAdamW.fields | {"momentum"}
    part_ends = staticmethod(whole_ends)

    def __init__(self, flat, lr, momentum=0.95, weight_decay=0.0):
        super().__init__(flat.trained, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        own = flat.own
        self.rest = RMSScaledAdamW(flat, lr, num_params=own.num_others)
        start = len(self.rest.gradients)
        self.gradients, self.weights = flat.own_gradients[start:], flat.masters[start:]
        momenta = torch.zeros_like(flat.own_gradients[start:])
        for piece, view in zip(own.pieces[own.num_others :], momenta.split(own.sizes[own.num_others :]), strict=True):
            self.state[piece.tensor] = dict(momentum=view.view(piece.tensor.shape))
        self.state |= self.rest.state
        self.momenta, shapes = momenta, [piece.tensor.shape for piece in own.pieces[own.num_others :]]
        self.batches = [batch for shape, same in groupby(shapes) for batch in _batches(len(list(same)), *shape)]
        self.groups = _groups(self.batches)

    @classmethod
    def fields_of(cls, is_matrix):
        """As FlatOptimizer.fields_of."""
        return frozenset({"momentum"}) if is_matrix else RMSScaledAdamW.fields

    @staticmethod
    def needed_bytes(trained, matrix_numbers):
        """Momenta of the matrices and two averages of other weights; a batch's directions in two forms."""
        return 8 * trained - 4 * matrix_numbers, 8 * min(matrix_numbers, BATCH_NUMBERS)

    @staticmethod
    def kernel_shapes(shapes):
        """All of them."""
        return shapes

    def count_steps(self):
        """As RMSScaledAdamW.count_steps."""
        self.rest.count_steps()

    def next_step(self):
        """As RMSScaledAdamW.next_step."""
        self.rest.next_step()

    @torch.no_grad()
    def apply(self, scale):
        """As RMSScaledAdamW.apply."""
        group = self.param_groups[0]
        self.rest.apply(scale)
        update = self.update_in_kernels if runs_kernels(self.weights) else self.update_in_passes
        update(group["lr"], scale, group["momentum"], group["weight_decay"])

    def in_batches(self, *flat):
        """Tuples of views (B, M, N) of the flat tensors, one tuple for each batch."""
        sizes = [math.prod(batch) for batch in self.batches]
        for batch, *parts in zip(self.batches, *(x.split(sizes) for x in flat), strict=True):
            yield tuple(part.view(batch) for part in parts)

    def update_in_passes(self, rate, scale, momentum, weight_decay):
        gradients = self.gradients.mul_(scale)
        self.momenta.mul_(momentum).add_(gradients)
        nesterov = gradients.add_(self.momenta, alpha=momentum)
        for weights, momenta in self.in_batches(self.weights, nesterov):
            self.update_matrices(weights, momenta, rate, weight_decay)

    def update_matrices(self, weights_BMN, momenta_BMN, rate, weight_decay):
        """Update B matrices of shape (M, N) along their orthogonalised momenta."""
        _, m, n = weights_BMN.shape
        rms = weights_BMN.norm(dim=(1, 2)) / (m * n) ** 0.5
        rms = rms.clamp(min=RMS_FLOOR)[:, None, None]
        if weight_decay:
            weights_BMN.mul_(1 - weight_decay * rate * rms)
        weights_BMN.add_(orthogonal(momenta_BMN) * (rms * (-0.2 * max(m, n) ** 0.5 * rate)))

    def update_in_kernels(self, rate, scale, momentum, weight_decay):
        from model.nn.kernels.muon import Subtraction, nesterov_directions

        views = self.in_batches(self.weights, self.gradients, self.momenta)
        for num_batches in self.groups:
            parts = []
            for weights, *gradients_and_momenta in islice(views, num_batches):
                step_rms = 0.2 * max(weights.shape[1:]) ** 0.5
                numbers = momentum, step_rms, RMS_FLOOR
                *directions, factors = nesterov_directions(weights, *gradients_and_momenta, rate, scale, numbers)
                parts.append((*directions, Subtraction(weights, factors, scale, weight_decay / step_rms)))
            orthogonalise_(parts)


def _batches(num_matrices, m, n):
    """Shapes (B, m, n) of the batches, almost equal, of at most BATCH_NUMBERS numbers (one matrix may exceed them)."""
    num_batches = -(-num_matrices // max(BATCH_NUMBERS // (m * n), 1))
    return [((num_matrices + place) // num_batches, m, n) for place in range(num_batches)]


def _groups(batches):
    """Numbers of batches, one after the other, that the kernels iterate on together: long ones of one shorter side."""
    groups, last = [], None
    for batch in batches:
        numbers, kind = math.prod(batch), min(batch[1:]) if is_long(*batch[1:]) else None
        if kind and last and last[0] == kind and last[1] + numbers <= BATCH_NUMBERS:
            groups[-1], last = groups[-1] + 1, (kind, last[1] + numbers)
        else:
            groups, last = [*groups, 1], (kind, numbers)
    return groups
