"""Several arrays of a batch in one tensor, so that one copy brings them to the GPU."""

import math
from dataclasses import dataclass

import numpy as np
import torch

ALIGNED = 4  # int32 elements = 16 bytes: Triton recompiles a kernel for a tensor that is not aligned to them


@dataclass(frozen=True)
class Flat:
    """Arrays of 32-bit numbers, one after the other in an int32 tensor, each aligned to 16 bytes."""

    data: torch.Tensor
    parts: tuple  # (name, shape, whether it is float32) of each

    def to(self, device):
        return Flat(self.data.to(device, non_blocking=True), self.parts)

    def tensors(self):
        """{name: tensor}, views of `data`."""
        sizes = [math.prod(shape) for _, shape, _ in self.parts]
        slots = self.data.split([_aligned_size(size) for size in sizes])
        parts = zip(self.parts, slots, sizes, strict=True)
        return {name: _as(slot[:size], shape, is_float) for (name, shape, is_float), slot, size in parts}


def _as(part, shape, is_float):
    part = part.view(torch.float32) if is_float else part
    return part if len(shape) == 1 else part.view(shape)


def flatten(arrays):
    """The Flat, in pinned memory, of {name: array}; float32 stays as it is, whole numbers become int32."""
    parts = tuple((name, x.shape, x.dtype == np.float32) for name, x in arrays.items())
    slots = [x.ravel().view(np.int32) if x.dtype == np.float32 else x.ravel() for x in arrays.values()]
    slots = [pad_to(x, _aligned_size(x.size)) for x in slots]
    data = torch.empty(sum(map(len, slots)), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    np.concatenate(slots, out=data.numpy(), casting="same_kind")
    return Flat(data, parts)


def pad_to(array, size, value=0):
    """`array` (n,) extended to `size` elements by `value`."""
    return np.concatenate([array, np.full(size - len(array), value, array.dtype)])


def _aligned_size(size):
    return math.ceil(size / ALIGNED) * ALIGNED
