"""NF4 with double quantisation: matrices at 4.13 bits a number, with the codes of bitsandbytes.

Dettmers et al. 2023 (QLoRA, arXiv 2305.14314). A number is one of 16 levels times the largest magnitude of its block of
64; these magnitudes, less their mean, are numbers of 8 bits (Dettmers et al. 2022, arXiv 2110.02861) times the largest
of each group of 256. A matrix has its codes for good, and its numbers only while a product needs them.
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK, GROUP = 64, 256  # numbers that share a magnitude, magnitudes that share a scale
NUMBER_BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * GROUP)
# quantiles of a normal distribution, the two ends at -1 and 1 and one level at 0
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class NF4Matrices:
    """Matrices of one shape, one after the other: views of flat tensors. `write` fills one, `read` gives all."""

    shape: tuple
    codes: torch.Tensor  # uint8 (numbers / 2,): the level of a number in the upper half of a byte, of the next below
    scales: torch.Tensor  # uint8 (blocks,)
    groups: torch.Tensor  # float32 (groups,)
    offsets: torch.Tensor  # float32 (matrices,)

    @torch.no_grad()
    def write(self, matrix):
        """Quantise a matrix into this place; on the device of the codes, for speed."""
        numbers = matrix.to(self.codes.device, torch.float32).view(-1, BLOCK)
        largest = numbers.abs().amax(1)
        scaled = (numbers * (1 / largest.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
        levels = _nearest(scaled, levels_on(self.codes.device)).view(-1, 2).to(torch.uint8)
        self.codes.copy_(levels[:, 0] << 4 | levels[:, 1])
        self.offsets.copy_(largest.mean())
        groups = F.pad(largest - self.offsets, (0, -len(largest) % GROUP)).view(-1, GROUP)
        self.groups.copy_(groups.abs().amax(1))
        scaled = (groups * (1 / self.groups.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
        self.scales.copy_(_nearest(scaled, steps_on(self.codes.device)).view(-1)[: len(largest)])

    def read(self, dtype, in_kernel):
        """The matrices as one (sum of their rows, columns)."""
        out = torch.empty(len(self.offsets) * self.shape[0], self.shape[1], dtype=dtype, device=self.codes.device)
        if in_kernel:
            from model.nn.kernels.nf4 import dequantize  # a CPU build of torch comes without Triton

            tables = levels_on(self.codes.device), steps_on(self.codes.device)
            return dequantize(self.codes, self.scales, self.groups, self.offsets, *tables, out)
        num_matrices, levels = len(self.offsets), levels_on(self.codes.device)
        scales = steps_on(self.codes.device)[self.scales.int()].view(num_matrices, -1)
        groups = self.groups.view(num_matrices, -1).repeat_interleave(GROUP, 1)[:, : scales.shape[1]]
        largest = scales * groups + self.offsets[:, None]
        numbers = levels[torch.stack([self.codes >> 4, self.codes & 15], 1).int()].view(-1, BLOCK)
        return out.copy_((numbers * largest.view(-1, 1)).view(out.shape))


def _nearest(numbers, sorted_values):
    return torch.bucketize(numbers, (sorted_values[:-1] + sorted_values[1:]) / 2)


def merge_packed(parts):
    """The NF4Matrices of adjacent matrices of one shape."""
    views = [[getattr(part, name) for part in parts] for name in ("codes", "scales", "groups", "offsets")]
    whole = [one[0].as_strided((sum(map(len, one)),), (1,), one[0].storage_offset()) for one in views]
    assert all(one[-1].storage_offset() == x.storage_offset() + len(x) - len(one[-1])
               for one, x in zip(views, whole, strict=True))  # fmt: skip
    return NF4Matrices(parts[0].shape, *whole)


def make_packed(shapes, device):
    """(flat tensors that hold matrices of these shapes in order, a NF4Matrices for each).

    Raises ValueError for a matrix whose numbers do not fill blocks.
    """
    if odd := [shape for shape in shapes if math.prod(shape) % BLOCK]:
        raise ValueError(f"base_precision=nf4 packs blocks of {BLOCK} numbers, and {odd[0]} does not fill them")
    blocks = [math.prod(shape) // BLOCK for shape in shapes]
    groups = [-(-count // GROUP) for count in blocks]
    sizes = [count * BLOCK // 2 for count in blocks], blocks, groups, [1] * len(shapes)
    kinds = (torch.uint8, torch.uint8, torch.float32, torch.float32)
    flats = [torch.zeros(sum(own), dtype=kind, device=device) for own, kind in zip(sizes, kinds, strict=True)]
    parts = zip(*(flat.split(own) for flat, own in zip(flats, sizes, strict=True)), strict=True)
    return flats, [NF4Matrices(tuple(shape), *views) for shape, views in zip(shapes, parts, strict=True)]


@functools.cache
@torch.inference_mode(False)  # what an answer makes first, training uses too
def levels_on(device):
    return torch.tensor(LEVELS, device=device)


@functools.cache
@torch.inference_mode(False)  # what an answer makes first, training uses too
def steps_on(device):
    """The 256 values of an 8-bit number, ascending: a sign, an exponent of ten, a fraction of the other bits."""
    steps = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        steps += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(steps), dtype=torch.float32, device=device)
