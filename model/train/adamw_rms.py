"""AdamW with steps scaled by RMS."""

import functools
import math

import torch

from model.nn.flat_params import runs_kernels
from model.train.flat_optimizer import FlatOptimizer

RMS_FLOOR = 1e-3  # Adafactor's eps2 (Shazeer and Stern 2018): lets a tensor near zero still change


class RMSScaledAdamW(FlatOptimizer):
    """AdamW whose step for each tensor is multiplied by max(1e-3, RMS of the tensor).

    With plain AdamW, encoder-decoders diverge at learning rates that work with Adafactor; scaling by RMS, as Adafactor
    does, prevents it (AdamWScale, Nawrot 2023, arXiv 2309.02373). The optimizer updates the trained weights of a
    FlatParams; its averages have the same flat layout, so that a GPU updates in one pass over memory. `lr` is a tensor
    on the weights' device, so that a step never waits for the host.
    """

    fields = frozenset(("count", "exp_avg", "exp_avg_sq"))

    def __init__(self, flat, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, num_params=None):
        """`num_params`: update only the first `num_params` tensors of this rank's part, which are whole; None: all."""
        own = flat.own
        pieces, self.sizes = own.pieces[:num_params], own.sizes[:num_params]
        self.num_others = own.num_others  # the first, which do not decay
        params, total = [piece.tensor for piece in pieces], sum(self.sizes)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.weights, self.gradients = flat.masters[:total], flat.own_gradients[:total]
        self.tensors = [piece.of(self.weights) for piece in pieces]
        self.averages, self.squares = torch.zeros_like(self.gradients), torch.zeros_like(self.gradients)
        self.counts = torch.zeros(len(params), device=lr.device)
        self.root_sizes = torch.tensor([p.numel() ** 0.5 for p in params], device=lr.device)
        for piece, count in zip(pieces, self.counts.unbind(), strict=True):
            average, square = piece.of(self.averages), piece.of(self.squares)
            self.state[piece.tensor] = dict(count=count, exp_avg=average, exp_avg_sq=square)
        self.num_steps = 0  # host copy of `counts`, which checkpoints hold
        self.corrections = torch.ones(2, device=lr.device)  # copy for the kernels of what `next_step` returns

    @staticmethod
    def needed_bytes(trained, matrix_numbers):
        """Two averages in float32, and no temporaries."""
        return 8 * trained, 0

    @staticmethod
    def kernel_shapes(shapes):
        """One: its kernels do not depend on shapes."""
        return shapes[:1]

    def count_steps(self):
        """Set the host's number of steps to that of the state."""
        self.num_steps = int(self.counts[0]) if len(self.counts) else 0

    @torch.no_grad()
    def next_step(self):
        """Count a step on the host, and write to the device what `apply` reads of it."""
        self.num_steps += 1
        correction1, correction2 = self.host_corrections()
        for element, number in zip(self.corrections.unbind(), (correction1, math.sqrt(correction2)), strict=True):
            element.fill_(number)  # unlike a copy from the host, it does not wait for the device

    def host_corrections(self):
        """What the averages of gradients and of squares are divided by, because they started at zero."""
        return [1 - beta**self.num_steps for beta in self.param_groups[0]["betas"]]

    @torch.no_grad()
    def apply(self, scale):
        """The update, after `next_step`; in kernels it reads nothing of the host, so that it can be captured."""
        if not self.tensors:
            return
        self.counts += scale > 0
        update = self.update_in_one_pass if runs_kernels(self.weights) else self.update_in_passes
        update(self.param_groups[0], scale)

    def update_in_passes(self, group, scale):
        (beta1, beta2), rate, gradients = group["betas"], group["lr"], self.gradients.mul_(scale)
        correction1, correction2 = self.host_corrections()
        self.averages.lerp_(gradients, 1 - beta1)
        self.squares.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        updates = self.averages / (self.squares.sqrt().div_(math.sqrt(correction2)).add_(group["eps"]))
        rms = (torch.stack(torch._foreach_norm(self.tensors)) / self.root_sizes).clamp(min=RMS_FLOOR)
        torch._foreach_mul_(updates.split(self.sizes), list((rms * (-rate / correction1)).unbind()))
        decayed = self.weights.split(self.sizes)[self.num_others :]
        if decayed and group["weight_decay"]:
            kept = 1 - group["weight_decay"] * rate * rms[self.num_others :]
            torch._foreach_mul_(decayed, list(kept.unbind()))
        self.weights.add_(updates)

    def update_in_one_pass(self, group, scale):
        from model.nn.kernels.adamw import update_adamw_rms  # imported late: CPU builds of torch have no Triton

        tensors = (self.weights, self.gradients, self.averages, self.squares)
        on_device = (group["lr"], scale, self.corrections)
        numbers = *group["betas"], group["eps"], group["weight_decay"], RMS_FLOOR
        update_adamw_rms(*tensors, self.tiles, self.num_others, on_device, numbers)

    @functools.cached_property
    def tiles(self):
        from model.nn.kernels.adamw import update_tiles

        return update_tiles(self.sizes, [p.numel() for p in self.param_groups[0]["params"]], self.weights.device)
