"""The bytes of the tensors that live at the same time in a step as a GPU computes it, counted without one.

On the meta device a tensor has a size and no memory, so a step of any shape takes a second.
"""

import weakref
from importlib import import_module

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# modules of model.nn that ask for kernels
ASKED = "layers", "loss", "flat_params", "dropout", "activations", "adapted_product", "decoder.rotary"
GROWN = ("loss", "flat_params", "adapted_product")  # those that add products to gradients


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make on the meta device while it is entered: `peak` is the most bytes."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **kwargs or {})
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and id(tensor.untyped_storage()) not in given:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        if storage not in self.known:
            self.known.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, count):
        self.now -= count


def use_kernels_without_launching_them(monkeypatch):
    """From now on networks make the tensors that they make for their Triton kernels, which do nothing."""
    jit = import_module("triton.runtime.jit")  # a CPU build of torch comes without Triton
    monkeypatch.setattr(jit.JITFunction, "__getitem__", lambda kernel, grid: lambda *args, **options: None)
    for name in ASKED:
        monkeypatch.setattr(import_module(f"model.nn.{name}"), "runs_kernels", lambda x: True)
    for name in GROWN:  # on a GPU they take no memory
        monkeypatch.setattr(import_module(f"model.nn.{name}"), "add_matmul", lambda total, a, b: None)


def peak_of_step(model, batch, chunk_tokens):
    """Most bytes that a forward and backward of `batch` hold at one time beside the weights, the batch included."""
    with LiveBytes() as live:
        batch = batch.to("meta")
        model(batch, chunk_tokens).backward()
    return live.peak
