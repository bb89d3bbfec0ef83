"""The optimizer Muon: orthogonalised momentum for the layers' matrices."""

import math
from functools import cache, partial
from itertools import accumulate, groupby

import torch

from model.memory.estimate import BATCH_NUMBERS, NUM_LANES
from model.nn.flat_params import runs_kernels
from model.train.adamw_rms import RMS_FLOOR, RMSScaledAdamW
from model.train.flat_optimizer import FlatOptimizer
from model.train.orthogonal import is_long, orthogonal, orthogonalise_, temporary_shapes

ALIGNMENT = 8  # numbers: 16 bytes of bf16, which a kernel loads at a time


class Muon(FlatOptimizer):
    """Muon for the layers' matrices, RMSScaledAdamW for the other weights.

    The update of a matrix is its orthogonalised momentum, with all singular values near 1 (Jordan et al. 2024,
    github.com/KellerJordan/Muon), times 0.2 sqrt(longer side), which matches the RMS of Adam's update (Liu et al. 2025,
    arXiv 2502.16982), times max(1e-3, RMS of the matrix) as in RMSScaledAdamW. Matrices of the same shape are updated
    as one batch. With `place` (rank, ranks) each rank updates only its own part of the matrices, and all momenta: the
    ranks then exchange `parts`, the weights of each rank's matrices.
    """

    def __init__(self, flat, lr, momentum=0.95, weight_decay=0.0, place=(0, 1)):
        super().__init__(flat.trained, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.rest = RMSScaledAdamW(flat, lr, weight_decay=weight_decay, num_params=flat.num_others)
        start, sizes = len(self.rest.gradients), flat.trained_sizes[flat.num_others :]
        self.gradients = flat.gradients[start:]
        self.weights = flat.masters[start : start + len(self.gradients)]
        self.momenta = torch.zeros_like(self.gradients)
        matrices = flat.trained[flat.num_others :]
        for p, momentum_view in zip(matrices, self.momenta.split(sizes), strict=True):
            self.state[p] = dict(momentum=momentum_view.view(p.shape))
        self.state |= self.rest.state
        self.rank, num_ranks = place
        shapes = [(owner, p.shape) for owner, p in zip(_owners(sizes, num_ranks), matrices, strict=True)]
        owned = [
            (owner, batch) for (owner, shape), same in groupby(shapes) for batch in _batches(len(list(same)), *shape)
        ]
        self.owners, self.batches = map(list, zip(*owned, strict=True)) if owned else ([], [])
        self.lanes = _lanes(_groups(owned), self.batches, self.rank)
        numbers = [sum(math.prod(batch) for other, batch in owned if other == owner) for owner in range(num_ranks)]
        self.parts = self.weights.split(numbers)

    def step(self, scale=None):
        """Update the weights with `scale` (0-dim, on the device; None: 1) times the gradients, which may change."""
        self.next_step()
        self.apply(torch.ones_like(self.param_groups[0]["lr"]) if scale is None else scale)

    def next_step(self):
        """As RMSScaledAdamW.next_step."""
        self.rest.next_step()

    @torch.no_grad()
    def apply(self, scale):
        """As RMSScaledAdamW.apply."""
        group, rest = self.param_groups[0], partial(self.rest.apply, scale)
        numbers = group["lr"], scale, group["momentum"], group["weight_decay"]
        if runs_kernels(self.weights):
            self.update_in_kernels(*numbers, works=[rest])
        else:
            rest()
            self.update_in_passes(*numbers)

    def in_batches(self, *flat):
        """Tuples of views (B, M, N) of the flat tensors, one tuple for each batch."""
        sizes = [math.prod(batch) for batch in self.batches]
        for batch, *parts in zip(self.batches, *(x.split(sizes) for x in flat), strict=True):
            yield tuple(part.view(batch) for part in parts)

    def update_in_passes(self, rate, scale, momentum, weight_decay):
        gradients = self.gradients.mul_(scale)
        self.momenta.mul_(momentum).add_(gradients)
        nesterov = gradients.add_(self.momenta, alpha=momentum)
        for owner, (weights, momenta) in zip(self.owners, self.in_batches(self.weights, nesterov), strict=True):
            if owner == self.rank:
                self.update_matrices(weights, momenta, rate, weight_decay)

    def update_matrices(self, weights_BMN, momenta_BMN, rate, weight_decay):
        """Update B matrices of shape (M, N) along their orthogonalised momenta."""
        _, m, n = weights_BMN.shape
        rms = weights_BMN.norm(dim=(1, 2)) / (m * n) ** 0.5
        factors = rms.clamp(min=RMS_FLOOR) * (-0.2 * max(m, n) ** 0.5 * rate)
        if weight_decay:
            weights_BMN.mul_(1 - rate * weight_decay)
        weights_BMN.add_(orthogonal(momenta_BMN) * factors[:, None, None])

    def update_in_kernels(self, *numbers, works=()):
        """Update the matrices and do `works`, which do not touch them, at the same time.

        `numbers` are as in update_in_passes.
        """
        views, lanes = list(self.in_batches(self.weights, self.gradients, self.momenta)), []
        for groups in self.lanes:
            lane = [(owner == self.rank, [views[place] for place in places]) for owner, places in groups]
            size = max(sum(map(_padded_numbers, _shapes_of_group(group))) for _, group in lane)
            # allocated here, not in the lane's own stream, so that it may be what backward has freed
            room = self.weights.new_empty(size, dtype=torch.bfloat16 if self.weights.is_cuda else None)
            lanes.append(partial(_update_lane, lane, room, *numbers))
        run_together([*lanes, *works], self.weights.device)


def _update_lane(lane, room, rate, scale, momentum, weight_decay):
    """Update groups of batches one after the other, with the flat tensor `room` for temporaries.

    `lane` has for each (True if the weights are this rank's to update, [(weights, gradients, momenta) of a batch]).
    """
    from model.nn.kernels.muon import Subtraction, nesterov_directions

    for is_own, group in lane:
        tensors, parts = _carve(room, _shapes_of_group(group)), []
        for directions, views in zip(tensors, group, strict=False):
            weights = views[0]
            constants = (momentum, 0.2 * max(weights.shape[1:]) ** 0.5, RMS_FLOOR)
            norms, factors = nesterov_directions(directions, views, rate, scale, constants)
            parts.append((directions, norms, Subtraction(weights, factors, rate, scale, weight_decay)))
        if is_own:
            orthogonalise_(parts, tensors[len(parts) :])


def _shapes_of_group(group):
    """Shapes of the directions of a group's batches, then of the other temporaries."""
    shapes = [weights.shape for weights, *_ in group]
    return [*shapes, *temporary_shapes(shapes)]


def _padded_numbers(shape):
    return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


def _carve(room, shapes):
    """Tensors of these shapes in the flat tensor `room`, one after the other."""
    starts = accumulate(map(_padded_numbers, shapes), initial=0)
    return [room[start : start + math.prod(shape)].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def run_together(works, device):
    """Call all `works`. A GPU does them at the same time, each in a stream, and afterwards what is queued later."""
    if device.type != "cuda":
        for work in works:
            work()
        return
    current = torch.cuda.current_stream(device)
    others = [_stream(device, number) for number in range(1, len(works))]
    for stream in others:
        stream.wait_stream(current)
    try:
        for work, stream in zip(works, [*others, current], strict=True):
            with torch.cuda.stream(stream):
                work()
    finally:  # memory may run out
        for stream in others:
            current.wait_stream(stream)


@cache
def _stream(device, number):
    return torch.cuda.Stream(device)


def _batches(num_matrices, m, n):
    """Shapes (B, m, n) of the batches, almost equal, of at most BATCH_NUMBERS numbers (one matrix may exceed them)."""
    num_batches = -(-num_matrices // max(BATCH_NUMBERS // (m * n), 1))
    return [((num_matrices + place) // num_batches, m, n) for place in range(num_batches)]


def _groups(owned):
    """[(owner, places of batches)]: batches, one after the other, that the kernels iterate on together.

    `owned` are (owner, batch); only long batches of one owner and one shorter side go together.
    """
    groups, last = [], None
    for place, (owner, batch) in enumerate(owned):
        numbers, kind = math.prod(batch), (owner, min(batch[1:])) if is_long(*batch[1:]) else None
        if kind and last and last[0] == kind and last[1] + numbers <= BATCH_NUMBERS:
            groups[-1][1].append(place)
            last = kind, last[1] + numbers
        else:
            groups.append((owner, [place]))
            last = kind, numbers
    return groups


def _lanes(groups, batches, rank):
    """At most NUM_LANES lists of groups, so that each has about as many numbers of this rank's own."""
    lanes, loads = [[] for _ in range(NUM_LANES)], [0] * NUM_LANES
    for owner, places in groups:
        lane = loads.index(min(loads))
        lanes[lane].append((owner, places))
        loads[lane] += sum(math.prod(batches[place]) for place in places) if owner == rank else 0
    return [lane for lane in lanes if lane]


def _owners(sizes, num_ranks):
    """The rank that updates each matrix, ascending, so that all have about the same number of elements."""
    ends, total = list(accumulate(sizes)), sum(sizes)
    return [int((end - size / 2) * num_ranks / total) for end, size in zip(ends, sizes, strict=True)]
