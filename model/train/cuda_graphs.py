"""Forward and backward of a micro-batch as CUDA graphs: recorded once for each padded size, then replayed in one call.

A step of small on a fast GPU launches a thousand kernels, which takes longer than they run until it has some 40,000
tokens.
"""

import torch


class StepGraphs:
    """CUDA graphs that put a micro-batch's gradients and loss's parts into the model's flat tensors, one for a Bucket.

    They share one pool of memory, which stays theirs until `clear`.
    """

    def __init__(self, model, buckets):
        self.model, self.buckets = model, buckets
        self.scale = torch.zeros((), device=model.flat.gradients.device)
        # the current one where it will do: cuBLAS keeps a workspace for each
        here, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        self.stream = torch.cuda.Stream() if here == default else here
        self.clear()

    def clear(self):
        """Forget all recordings and give their memory up."""
        self.stream.synchronize()  # a replay may still run
        self.recorded, self.pool = {}, None

    def bucket_of(self, lengths, most_tokens):
        """The smallest Bucket, of at most `most_tokens`, that holds pairs of these `lengths` (pairs, 2), or None."""
        return next((bucket for bucket in self.buckets if bucket.tokens <= most_tokens and bucket.holds(lengths)), None)

    def gradients(self, micro_batch, bucket, chunk_tokens, z_loss, scale):
        """Put the gradients of `scale` times the micro-batch's loss, and its parts, into the model's flat tensors.

        They must be zero before.
        """
        key = (bucket, chunk_tokens, z_loss, self.model.gradient_checkpointing)
        self.scale.fill_(scale)
        if key not in self.recorded:
            self.recorded[key] = self._record(micro_batch, chunk_tokens, z_loss)
        batch, graph = self.recorded[key]
        batch.flat.copy_(micro_batch.flat, non_blocking=True)
        graph.replay()

    def _record(self, micro_batch, chunk_tokens, z_loss):
        """(the MicroBatch that the graph reads, the graph), after a run that compiles kernels and sets up libraries."""
        batch = micro_batch.to(self.scale.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._run(batch, chunk_tokens, z_loss)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # empties the cache first; other threads may go on using the device
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            self._run(batch, chunk_tokens, z_loss)
        self.pool = graph.pool()
        self.model.zero_grad()
        return batch, graph

    def _run(self, batch, chunk_tokens, z_loss):
        loss, parts = self.model.loss_and_parts(batch, chunk_tokens, z_loss)
        (loss * self.scale).backward()
        self.model.flat.loss_parts.add_(parts * self.scale)
