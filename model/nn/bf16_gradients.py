"""Gradients in bf16: those of a first forward are rounded once, what later ones add to them is rounded stochastically.

Rounded to the nearest number, what is below a 512th of a sum would never be added to it. The random bits are Philox's
of the seed, the step, the micro-batch and a weight's position: another attempt and a resume draw the same.
"""

import torch

from model.nn.dropout import step_key
from model.nn.rounding import round_to
from model.nn.weight_parts import share

NUMBERS_AT_ONCE = 2**22  # of a matrix whose product is in float32 before it is added


class GradientRounding:
    """How backward adds to gradients in bf16; `begin` says for which micro-batch, on the device for CUDA graphs."""

    def __init__(self, device):
        self.key, self.is_first = torch.zeros(2, dtype=torch.int32, device=device), True

    def begin(self, seed, step, rank, number):
        """Round what this micro-batch of a rank's step adds from now on; the gradients are zero before the first."""
        self.is_first = number == 0
        words = step_key(("gradients", seed), (step, rank, number))
        for word, value in zip(self.key.unbind(), words, strict=True):
            word.fill_(value)  # unlike a copy from the host, it does not wait for the device

    def add(self, total, values, use=0):
        """total += values, float32, which may change; `total` is a contiguous view of the flat gradients.

        `use` counts what the micro-batch has added there before, as far as it has the same random bits.
        """
        if self.is_first and not use:
            total.add_(values)
        else:
            round_to(total.view(-1), values.add_(total).view(-1), total.storage_offset(), self.key + use)

    def add_product(self, total, a, b, use=0):
        """total += a @ b, of matrices in bf16 whose products are added in float32; few rows of it exist in float32."""
        if self.is_first and not use:
            total.addmm_(a, b)
            return
        rows = max(NUMBERS_AT_ONCE // total.shape[1], 1)
        for part, factor in zip(total.split(rows), a.split(rows), strict=True):
            self.add(part, _product(factor, b), use)

    def add_rows(self, total, rows, sums):
        """total[rows] += sums (rows, width), float32, which may change; a row that comes twice gets zeros."""
        values = sums.add_(total[rows])
        rounded = values.to(total.dtype)
        if not self.is_first:  # with other bits than `add`
            round_to(rounded.view(-1), values.view(-1), 0, self.key - 1)
        total.index_copy_(0, rows, rounded)


def _product(a, b):
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def hold_rounded(flat):
    """Hold FlatParams that were made with `will_round` as share and hold_in_bf16 do, all of them in one part."""
    share(flat, [len(flat.copies)], 0, keeps_masters=False)
    hold_in_bf16(flat)


@torch.no_grad()
def hold_in_bf16(flat):
    """Hold the gradients of a FlatParams, whose masters weight_parts.share has moved, in the dtype of its copies.

    Weights that the network reads in float32 are few: their gradients stay in float32, before the metrics' sums.
    """
    device, sizes = flat.gradients.device, [p.numel() for p in flat.read_whole]
    for p in flat.trained:
        p.grad = None
    # the float32 ones are free before others are made: a card may not hold both
    total, num_sums = len(flat.gradients), len(flat.sums)
    flat.gradients = flat.sums = flat.beside = flat.gradients_and_sums = None
    flat.gradients = torch.zeros(total, dtype=flat.copies.dtype, device=device)
    flat.beside = torch.zeros(sum(sizes) + num_sums, device=device)
    *whole, flat.sums = flat.beside.split([*sizes, num_sums])
    flat.rounding = GradientRounding(device)
    for p, part in zip(flat.trained, flat.gradients.split(flat.trained_sizes), strict=True):
        if p.dtype == part.dtype:
            p.grad, p.rounding = part[: p.numel()].view(p.shape), flat.rounding
    for p, part in zip(flat.read_whole, whole, strict=True):
        p.grad = part.view(p.shape)
