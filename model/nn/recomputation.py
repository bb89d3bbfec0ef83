"""Blocks whose activations backward computes again from their inputs, which may wait for that in host memory."""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recomputed(function, *args, host=None):
    """function(*args), whose backward computes it again from the tensors among `args`, which a HostInputs may keep."""
    options = dict(use_reentrant=False, preserve_rng_state=False)
    if host is None:
        return checkpoint(function, *args, **options)
    with saved_tensors_hooks(host.put, host.get):  # what `function` saves meanwhile is checkpoint's
        return checkpoint(function, *args, **options)


class HostInputs:
    """The inputs of one forward's recomputed blocks, in host memory (page-locked for a GPU) until backward needs them.

    A GPU copies on a stream beside its work: an input leaves while its block is computed, and comes back while the
    block after it is computed again. So at most two are on the device at a time.
    """

    def __init__(self, device):
        self.device, self.kept = device, []  # in the order of forward
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving = None  # (an input on the device, event after which its copy is complete)
        self.arriving = {}  # {number of an input: (itself on the device, event after which it is complete)}

    def put(self, x):
        """The number of an input, by which `get` gives it back.

        An empty tensor, which PyTorch 2.11's checkpoint saves beside each input, is its own number.
        """
        if not x.numel():
            return x
        self._let_go()
        self.kept.append(self._to_host(x.detach()))
        return len(self.kept) - 1

    def get(self, number):
        """The input of this number on the device; once. The one before it begins to come back."""
        if isinstance(number, torch.Tensor):
            return number
        self._let_go()
        if number not in self.arriving:
            self._fetch(number)
        x, arrived = self.arriving.pop(number)
        if arrived:
            torch.cuda.current_stream().wait_event(arrived)
        if number:
            self._fetch(number - 1)
        return x

    def _let_go(self):
        """Free the input that left last, once its copy is complete."""
        if self.leaving and self.leaving[1]:
            torch.cuda.current_stream().wait_event(self.leaving[1])
        self.leaving = None

    def _to_host(self, x):
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.stream is not None)
        self.leaving = x, self._copy(kept, x)
        return kept

    def _fetch(self, number):
        kept, self.kept[number] = self.kept[number], None
        x = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        self.arriving[number] = x, self._copy(x, kept)

    def _copy(self, to, x):
        """Begin to copy x; returns the event after which that is complete, None where it is so already."""
        if not self.stream:
            to.copy_(x)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())  # which makes x, or had the memory of `to`
        with torch.cuda.stream(self.stream):
            to.copy_(x, non_blocking=True)
            return self.stream.record_event()

    def __del__(self):
        if self.stream and self.arriving:  # backward failed: nobody may get memory that is still written
            self.stream.synchronize()
