"""AdamW, as torch.optim.AdamW's fused kernel computes it."""

import torch

from model.nn.flat_params import runs_kernels
from model.nn.weight_parts import equal_ends
from model.train.flat_optimizer import FlatOptimizer


class AdamW(FlatOptimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over the trained weights of a FlatParams.

    Its results and its state's names are those of torch.optim.AdamW, bit for bit, with weight decay for the layers'
    matrices alone; but on a GPU an update obeys a scale
    on the device and reads nothing of the host, so that it can be captured.
    """

    fields = frozenset(("step", "exp_avg", "exp_avg_sq"))
    count_field = "step"
    part_ends = staticmethod(equal_ends)

    def __init__(self, flat, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(flat.trained, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.weights, self.gradients, pieces = flat.masters, flat.own_gradients, flat.own.pieces
        self.num_others = flat.own.num_others
        self.counts = torch.zeros(len(pieces), device=lr.device)
        flats = self.weights, self.gradients, *(torch.zeros_like(self.gradients) for _ in range(2))
        self.tensors = []  # (weights, gradients, averages, squares, count) of each piece
        for piece, count in zip(pieces, self.counts.unbind(), strict=True):
            *own, average, square = [piece.of(flat) for flat in flats]
            self.state[piece.tensor] = dict(step=count, exp_avg=average, exp_avg_sq=square)
            self.tensors.append((*own, average, square, count))

    @staticmethod
    def needed_bytes(trained, matrix_numbers):
        """Two averages in float32, and no temporaries."""
        return 8 * trained, 0

    @torch.no_grad()
    def apply(self, scale):
        """The update; in kernels a scale that is not above 0 changes nothing, the gradients included."""
        weight_decay, scales = self.param_groups[0]["weight_decay"], {}
        if runs_kernels(self.weights):
            scales = dict(grad_scale=scale.reciprocal(), found_inf=(~(scale > 0)).float())
            self.counts += scale > 0
        else:
            self.gradients.mul_(scale)
            self.counts += 1
        first_decayed = self.num_others if weight_decay else 0
        for part, decay in ((self.tensors[:first_decayed], 0.0), (self.tensors[first_decayed:], weight_decay)):
            if part:
                self.update_part(part, decay, scales)

    def update_part(self, tensors, weight_decay, scales):
        """The update of some of `self.tensors`; `scales` are those of torch's kernel."""
        group = self.param_groups[0]
        weights, gradients, averages, squares, counts = map(list, zip(*tensors, strict=True))
        torch._fused_adamw_(
            weights, gradients, averages, squares, [], counts, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=weight_decay, eps=group["eps"], amsgrad=False, maximize=False,
            **scales,
        )  # fmt: skip
