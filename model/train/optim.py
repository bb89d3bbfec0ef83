"""The optimizers: AdamW with steps scaled by RMS, Muon, Adafactor and torch's AdamW."""

import functools
import math
from itertools import groupby

import torch

from model.memory.estimate import BATCH_NUMBERS
from model.nn.flat_params import runs_kernels

RMS_FLOOR = 1e-3  # Adafactor's eps2 (Shazeer and Stern 2018): lets a tensor near zero still change
SQUARE_FLOOR = 1e-30  # Adafactor's eps1: avoids a division by zero in a row whose gradients are all zero


class FlatOptimizer:
    """Parameters in one group, and a state for each of them, as torch.optim.Optimizer has.

    The constructor of torch's own imports 870 modules in two seconds.
    """

    def __init__(self, params, options):
        self.param_groups, self.state = [options | dict(params=list(params))], {}


class RMSScaledAdamW(FlatOptimizer):
    """AdamW whose step for each tensor is multiplied by max(1e-3, RMS of the tensor).

    With plain AdamW, encoder-decoders diverge at learning rates that work with Adafactor; scaling by RMS, as Adafactor
    does, prevents it (AdamWScale, Nawrot 2023, arXiv 2309.02373). The optimizer updates the trained weights of a
    FlatParams; its averages have the same flat layout, so that a GPU updates in one pass over memory. `lr` is a tensor
    on the weights' device, so that a step never waits for the host.
    """

    def __init__(self, flat, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, num_params=None):
        """`num_params`: update only the first `num_params` trained tensors; None: all."""
        params, self.sizes = flat.trained[:num_params], flat.trained_sizes[:num_params]
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.weights, self.gradients = flat.masters[: sum(self.sizes)], flat.gradients[: sum(self.sizes)]
        self.averages, self.squares = torch.zeros_like(self.gradients), torch.zeros_like(self.gradients)
        self.counts = torch.zeros(len(params), device=lr.device)
        self.root_sizes = torch.tensor([p.numel() ** 0.5 for p in params], device=lr.device)
        fields = (self.counts.unbind(), self.averages.split(self.sizes), self.squares.split(self.sizes))
        for p, count, average, square in zip(params, *fields, strict=True):
            average, square = (x[: p.numel()].view(p.shape) for x in (average, square))
            self.state[p] = dict(count=count, exp_avg=average, exp_avg_sq=square)
        self.num_steps = 0  # host copy of `counts`, which checkpoints hold

    @torch.no_grad()
    def step(self, scale=None):
        """Update the weights with `scale` (0-dim, on the device; None: 1) times the gradients, which may change."""
        group = self.param_groups[0]
        scale = torch.ones_like(group["lr"]) if scale is None else scale
        self.num_steps += 1
        self.counts += 1
        corrections = [1 - beta**self.num_steps for beta in group["betas"]]  # of the averages' bias towards zero
        update = self.update_in_one_pass if runs_kernels(self.weights) else self.update_in_passes
        update(group, scale, *corrections)

    def update_in_passes(self, group, scale, correction1, correction2):
        (beta1, beta2), rate, gradients = group["betas"], group["lr"], self.gradients.mul_(scale)
        self.averages.lerp_(gradients, 1 - beta1)
        self.squares.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        updates = self.averages / (self.squares.sqrt().div_(math.sqrt(correction2)).add_(group["eps"]))
        rms = torch.stack(torch._foreach_norm(group["params"])) / self.root_sizes
        rates = rms.clamp(min=RMS_FLOOR) * (-rate / correction1)
        torch._foreach_mul_(updates.split(self.sizes), list(rates.unbind()))
        self.weights.mul_(1 - rate * group["weight_decay"]).add_(updates)

    def update_in_one_pass(self, group, scale, *corrections):
        from model.nn.kernels.adamw import update_adamw_rms  # imported late: CPU builds of torch have no Triton

        tensors = (self.weights, self.gradients, self.averages, self.squares)
        numbers = (group["lr"], scale, *group["betas"], *corrections, group["eps"], group["weight_decay"])
        update_adamw_rms(*tensors, self.tiles, *numbers, RMS_FLOOR)

    @functools.cached_property
    def tiles(self):
        from model.nn.kernels.adamw import update_tiles

        return update_tiles(self.sizes, [p.numel() for p in self.param_groups[0]["params"]], self.weights.device)


class Muon(FlatOptimizer):
    """Muon for the layers' matrices, RMSScaledAdamW for the other weights.

    The update of a matrix is its orthogonalised momentum, with all singular values near 1 (Jordan et al. 2024,
    github.com/KellerJordan/Muon), times 0.2 sqrt(longer side), which matches the RMS of Adam's update (Liu et al. 2025,
    arXiv 2502.16982), times max(1e-3, RMS of the matrix) as in RMSScaledAdamW. Matrices of the same shape are updated
    as one batch.
    """

    def __init__(self, flat, lr, momentum=0.95, weight_decay=0.0):
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
        self.batches = [
            batch for shape, same in groupby(p.shape for p in matrices) for batch in _batches(len(list(same)), *shape)
        ]

    @torch.no_grad()
    def step(self, scale=None):
        """Update the weights with `scale` (0-dim, on the device; None: 1) times the gradients, which may change."""
        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        self.rest.step(scale)
        gradients = self.gradients if scale is None else self.gradients.mul_(scale)
        self.momenta.mul_(momentum).add_(gradients)
        nesterov = gradients.add_(self.momenta, alpha=momentum)
        sizes = [math.prod(batch) for batch in self.batches]
        parts = zip(self.batches, self.weights.split(sizes), nesterov.split(sizes), strict=True)
        for batch, weights, momenta in parts:
            self.update_matrices(weights.view(batch), momenta.view(batch), rate, group["weight_decay"])

    def update_matrices(self, weights_BMN, momenta_BMN, rate, weight_decay):
        """Update B matrices of shape (M, N) along their orthogonalised momenta."""
        _, m, n = weights_BMN.shape
        rms = weights_BMN.norm(dim=(1, 2)) / (m * n) ** 0.5
        factors = rms.clamp(min=RMS_FLOOR) * (-0.2 * max(m, n) ** 0.5 * rate)
        if weight_decay:
            weights_BMN.mul_(1 - rate * weight_decay)
        weights_BMN.add_(orthogonal(momenta_BMN) * factors[:, None, None])


def _batches(num_matrices, m, n):
    """Shapes (B, m, n) of the batches that `num_matrices` matrices are split into, of at most BATCH_NUMBERS numbers."""
    largest = max(BATCH_NUMBERS // (m * n), 1)
    return [(min(largest, num_matrices - first), m, n) for first in range(0, num_matrices, largest)]


def orthogonal(matrices_BMN):
    """`matrices_BMN` (B, M, N) with all singular values moved near 1; computed in bf16 on a GPU.

    Five steps of the Newton-Schulz iteration with the coefficients of Jordan et al. 2024.
    """
    tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if tall else matrices_BMN
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype, memory_format=torch.contiguous_format)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Adafactor(FlatOptimizer):
    """Adafactor without momentum: a tensor's update has RMS at most 1, times max(1e-3, RMS of the tensor).

    The state of a matrix is the row and column means of its squared gradients, averaged over steps with decay
    1 - step^-0.8 (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 to 6). Adjacent tensors of the same shape are
    updated as one batch, without waiting for the device; torch.optim.Adafactor waits twice per tensor.
    """

    def __init__(self, flat, lr, weight_decay=0.0):
        super().__init__(flat.trained, dict(lr=lr, weight_decay=weight_decay))
        self.counts, self.num_steps, self.batches = torch.zeros(len(flat.trained), device=lr.device), 0, []
        for shape, same in groupby(enumerate(flat.trained), key=lambda item: item[1].shape):
            numbers, params = zip(*same, strict=True)
            batch, start = (len(params), *shape), sum(flat.trained_sizes[: numbers[0]])
            weights, gradients = (
                x[start : start + math.prod(batch)].view(batch) for x in (flat.masters, flat.gradients)
            )
            shapes = dict(rows=batch[:2], columns=batch[::2]) if len(shape) == 2 else dict(squares=batch)
            means = {name: torch.zeros(sizes, device=lr.device) for name, sizes in shapes.items()}
            for place, (number, p) in enumerate(zip(numbers, params, strict=True)):
                self.state[p] = dict(count=self.counts[number]) | {name: mean[place] for name, mean in means.items()}
            self.batches.append((weights, gradients, means))

    @torch.no_grad()
    def step(self, scale=None):
        """Update the weights with `scale` (0-dim, on the device; None: 1) times the gradients, which are changed."""
        rate, weight_decay = (self.param_groups[0][name] for name in ("lr", "weight_decay"))
        self.counts += 1
        self.num_steps += 1
        for weights, gradients, means in self.batches:
            direction = gradients if scale is None else gradients.mul_(scale)
            _divide_by_root_mean_squares(direction, means, self.num_steps**-0.8)
            factors = _rms(weights).clamp(min=RMS_FLOOR) * -rate / _rms(direction).clamp(min=1.0)
            if weight_decay:
                weights.mul_(1 - rate * weight_decay)
            weights.addcmul_(direction, factors.view(-1, *[1] * (weights.dim() - 1)))


def _divide_by_root_mean_squares(gradients, means, share):
    """Divide `gradients` in place by the roots of their averaged squares, to which they contribute a `share`."""
    if "squares" in means:
        means["squares"].lerp_(gradients.square().add_(SQUARE_FLOOR), share)
        gradients.mul_(means["squares"].rsqrt())
        return
    rows, columns = means["rows"], means["columns"]
    for mean, axis in ((rows, 2), (columns, 1)):
        mean.lerp_(gradients.norm(dim=axis).square_().div_(gradients.shape[axis]).add_(SQUARE_FLOOR), share)
    gradients.mul_((rows / rows.mean(dim=1, keepdim=True)).rsqrt_()[:, :, None]).mul_(columns.rsqrt()[:, None, :])


def _rms(batch):
    """Root mean square of each tensor of a batch."""
    return batch.flatten(1).norm(dim=1) / math.prod(batch.shape[1:]) ** 0.5


STATE_FIELDS = {  # of each weight's state, by optimizer
    RMSScaledAdamW: {"count", "exp_avg", "exp_avg_sq"},
    Muon: {"count", "exp_avg", "exp_avg_sq", "momentum"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    Adafactor: {"count", "rows", "columns", "squares"},
}


def make_optimizer(model, config):
    """The optimizer that `config.optimizer` names, over the trainable weights.

    Its learning rate is a tensor on the weights' device, which `update` writes.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    decay, rate = config.weight_decay, torch.tensor(config.learn_rate, device=params[0].device)
    if config.optimizer == "adamw_rms":
        return RMSScaledAdamW(model.flat, rate, weight_decay=decay)
    if config.optimizer == "muon":
        return Muon(model.flat, rate, weight_decay=decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(params, rate, weight_decay=decay, fused=True)
    return Adafactor(model.flat, rate, weight_decay=decay)


def reset_state(optimizer):
    """Zero the optimizer's state in place, as before the first update."""
    for fields in optimizer.state.values():
        for value in fields.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    count_steps(optimizer)


def count_steps(optimizer):
    """Set the host's step count of an optimizer from its state; torch's AdamW keeps its own."""
    if not isinstance(optimizer, torch.optim.AdamW):
        counter = getattr(optimizer, "rest", optimizer)
        counter.num_steps = int(counter.counts[0])


def update(optimizer, gradients, rate, scale):
    """Update the weights at learning rate `rate` with `scale` times the flat `gradients`, which may change.

    `scale` is a 0-dim tensor on the device, so the host does not wait for it.
    """
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
    if isinstance(optimizer, torch.optim.AdamW):
        gradients.mul_(scale)
        optimizer.step()
    else:
        optimizer.step(scale)
