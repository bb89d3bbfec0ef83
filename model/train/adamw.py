"""AdamW, as torch.optim.AdamW's fused kernel computes it."""

import torch

from model.nn.dropout import step_key
from model.nn.flat_params import runs_kernels
from model.nn.rounding import round_to
from model.nn.weight_parts import equal_ends, gradients_of, masters_of
from model.train.flat_optimizer import FlatOptimizer

ROUNDED_TOGETHER = 2**24  # weights in bf16 that are updated at a time: so many are in float32 meanwhile


class AdamW(FlatOptimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over the trained weights of a FlatParams.

    Its results and its state's names are those of torch.optim.AdamW, bit for bit, with weight decay for the layers'
    matrices alone; but on a GPU an update obeys a scale
    on the device and reads nothing of the host, so that it can be captured.
    """

    fields = frozenset(("step", "exp_avg", "exp_avg_sq"))
    count_field = "step"
    part_ends = staticmethod(equal_ends)

    def __init__(self, flat, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, seed=0):
        super().__init__(flat.trained, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.weights, self.gradients, pieces = flat.masters, flat.own_gradients, flat.own.pieces
        self.num_others = flat.own.num_others
        self.counts = torch.zeros(len(pieces), device=lr.device)
        self.seed, self.num_steps, self.key = seed, 0, torch.zeros(2, dtype=torch.int32, device=lr.device)
        self.first, self.averages, self.squares = flat.own.start, self.new_state(), self.new_state()
        self.tensors = []  # (weights, gradients, averages, squares, count) of each piece
        self.positions = []  # of the first number of each piece among all weights
        for piece, count in zip(pieces, self.counts.unbind(), strict=True):
            average, square = piece.of(self.averages), piece.of(self.squares)
            self.state[piece.tensor] = dict(step=count, exp_avg=average, exp_avg_sq=square)
            self.tensors.append((masters_of(flat, piece), gradients_of(flat, piece), average, square, count))
            self.positions.append(self.first + piece.at)

    def new_state(self):
        """Zeros of the layout of the gradients, in float32."""
        return torch.zeros_like(self.gradients, dtype=torch.float32)

    @staticmethod
    def needed_bytes(trained, matrix_numbers):
        """Two averages in float32, and no temporaries."""
        return 8 * trained, 0

    @property
    def rounds(self):
        """Whether weights are in bf16, to which updates are rounded stochastically."""
        return self.weights.dtype != torch.float32

    def count_steps(self):
        """Set the host's number of steps, which the key of the rounding is drawn from, to that of the state."""
        if self.rounds:
            self.num_steps = int(self.counts[0]) if len(self.counts) else 0

    def next_step(self):
        """Count a step on the host, and write the key of its rounding to the device."""
        if self.rounds:
            self.num_steps += 1
            for word, value in zip(self.key.unbind(), step_key(("rounding", self.seed), self.num_steps), strict=True):
                word.fill_(value)

    @torch.no_grad()
    def apply(self, scale):
        """The update; in kernels a scale that is not above 0 changes nothing, the gradients included."""
        weight_decay, scales = self.param_groups[0]["weight_decay"], self.kernel_scales(scale)
        self.counts += scale > 0 if scales else 1
        if self.rounds:
            self.update_rounded(weight_decay, scale, scales)
            return
        if not scales:
            self.gradients.mul_(scale)
        first_decayed = self.num_others if weight_decay else 0
        for part, decay in ((self.tensors[:first_decayed], 0.0), (self.tensors[first_decayed:], weight_decay)):
            if part:
                self.update_part(part, decay, scales)

    def kernel_scales(self, scale):
        """What torch's kernel on a GPU takes of the gradients' scale; a CPU multiplies them by it."""
        is_on_gpu = runs_kernels(self.gradients)
        return dict(grad_scale=scale.reciprocal(), found_inf=(~(scale > 0)).float()) if is_on_gpu else {}

    def update_rounded(self, weight_decay, scale, scales):
        """The update of weights in bf16, of few numbers at a time: they and their gradients are then in float32."""
        for number, (tensors, position) in enumerate(zip(self.tensors, self.positions, strict=True)):
            *flats, count = tensors
            decay = weight_decay if number >= self.num_others else 0.0
            parts = zip(*(x.view(-1).split(ROUNDED_TOGETHER) for x in flats), strict=True)
            for place, (weights, gradients, *averages) in enumerate(parts):
                updated, gradients = weights.float(), gradients.float()
                gradients = gradients if scales else gradients * scale
                self.update_part([(updated, gradients, *averages, count)], decay, scales)
                if weights.dtype == torch.float32:
                    weights.copy_(updated)
                else:
                    round_to(weights, updated, position + place * ROUNDED_TOGETHER, self.key)

    def update_part(self, tensors, weight_decay, scales):
        """The update of some of `self.tensors`; `scales` are those of torch's kernel."""
        group = self.param_groups[0]
        weights, gradients, averages, squares, counts = map(list, zip(*tensors, strict=True))
        torch._fused_adamw_(
            weights, gradients, averages, squares, [], counts, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=weight_decay, eps=group["eps"], amsgrad=False, maximize=False,
            **scales,
        )  # fmt: skip
