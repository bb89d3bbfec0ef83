"""Work of the device captured as CUDA graphs, which replay all of its kernels in one call."""

import functools
import threading

import torch


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory, because they run one after the other.

    What a graph allocates belongs to the pool until the GraphCapture and its graphs are gone; what a graph leaves is in
    tensors of others.
    """

    def __init__(self):
        # cuBLAS keeps a workspace per stream: use the current stream unless it is the default, which cannot capture
        current = torch.cuda.current_stream()
        is_default = current == torch.cuda.default_stream()
        self.stream = _other_stream(current.device, threading.get_ident()) if is_default else current
        self.pool = torch.cuda.MemPool()

    def run(self, work, *args):
        """Do `work(*args)` where it will be captured: this compiles kernels and sets up libraries outside the pool."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work(*args)
        torch.cuda.current_stream().wait_stream(self.stream)

    def run_in_pool(self, work, *args):
        """Do `work(*args)` in the memory of the graphs, which they do not use between their replays.

        `work` must leave all results in tensors of others: the next replay overwrites what it allocates.
        """
        torch.cuda.empty_cache()  # a pool that grows takes nothing from what the allocator holds for others
        # backward on this thread: only its allocations go to the pool
        with torch.cuda.use_mem_pool(self.pool), torch.autograd.set_multithreading_enabled(False):
            self.run(work, *args)

    def capture(self, work, *args):
        """The CUDA graph of `work(*args)`, which must have been run before."""
        graph = torch.cuda.CUDAGraph()
        self.run(self._capture_into, graph, work, *args)
        return graph

    def _capture_into(self, graph, work, *args):
        graph.capture_begin(self.pool.id, capture_error_mode="thread_local")  # other threads may use the device
        try:
            work(*args)
        finally:  # memory may run out
            graph.capture_end()


@functools.cache  # one a thread: what another thread launches on it would be captured too
def _other_stream(device, thread):
    return torch.cuda.Stream(device)
