"""Work of the device recorded as CUDA graphs, which replay all of its kernels in one call."""

import functools

import torch


class Recorder:
    """Records CUDA graphs that share one pool of memory, because they run one after the other.

    What a graph allocates belongs to the pool until all its graphs are gone; what it leaves is in tensors of others.
    """

    def __init__(self):
        # cuBLAS keeps a workspace per stream: use the current stream unless it is the default, which cannot capture
        current = torch.cuda.current_stream()
        self.stream = _other_stream(current.device) if current == torch.cuda.default_stream() else current
        self.pool = None

    def run(self, work, *args):
        """Do `work(*args)` where it will be recorded: this compiles kernels and sets up libraries outside the pool."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work(*args)
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, work, *args):
        """The CUDA graph of `work(*args)`, which must have been run before."""
        graph = torch.cuda.CUDAGraph()
        self.run(self._capture, graph, work, *args)
        self.pool = graph.pool()
        return graph

    def _capture(self, graph, work, *args):
        pool = () if self.pool is None else (self.pool,)
        graph.capture_begin(*pool, capture_error_mode="thread_local")  # other threads may use the device meanwhile
        try:
            work(*args)
        finally:  # memory may run out
            graph.capture_end()


@functools.cache
def _other_stream(device):
    return torch.cuda.Stream(device)
