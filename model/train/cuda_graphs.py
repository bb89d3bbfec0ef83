"""Forward and backward of a micro-batch as CUDA graphs: recorded once per padded size, then replayed in one call.

A step of the model `small` launches about a thousand kernels. On a fast GPU, with fewer than about 40,000 tokens, the
launches take longer than the kernels.
"""

import torch


class StepGraphs:
    """CUDA graphs, one per Bucket, that write a micro-batch's gradients and loss parts to the model's flat tensors.

    They share one memory pool, which is held until `clear`.
    """

    def __init__(self, model, buckets):
        self.model, self.buckets = model, buckets
        self.scale = torch.zeros((), device=model.flat.gradients.device)
        # cuBLAS keeps a workspace per stream: use the current stream unless it is the default, which cannot capture
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        self.stream = torch.cuda.Stream() if current == default else current
        self.clear()

    def clear(self):
        """Delete all recorded graphs and free their memory."""
        self.stream.synchronize()  # a replay may still be running
        self.recorded, self.pool = {}, None

    def bucket_of(self, lengths, most_tokens):
        """The smallest Bucket of at most `most_tokens` tokens that holds pairs of `lengths` (pairs, 2), or None."""
        return next((bucket for bucket in self.buckets if bucket.tokens <= most_tokens and bucket.holds(lengths)), None)

    def gradients(self, micro_batch, bucket, chunk_tokens, z_loss, scale):
        """Write the gradients and the parts of `scale` times the micro-batch's loss to the model's flat tensors.

        The flat tensors must be zero before the call.
        """
        key = (bucket, chunk_tokens, z_loss, self.model.gradient_checkpointing)
        self.scale.fill_(scale)
        if key not in self.recorded:
            self.recorded[key] = self._record(micro_batch, chunk_tokens, z_loss)
        batch, graph = self.recorded[key]
        batch.flat.copy_(micro_batch.flat, non_blocking=True)
        graph.replay()

    def _record(self, micro_batch, chunk_tokens, z_loss):
        """(the MicroBatch that the graph reads, the graph). A first run compiles kernels and sets up libraries."""
        batch = micro_batch.to(self.scale.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._run(batch, chunk_tokens, z_loss)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # capture empties the allocator's cache first; thread_local: other threads may use the device meanwhile
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            self._run(batch, chunk_tokens, z_loss)
        self.pool = graph.pool()
        self.model.zero_grad()
        return batch, graph

    def _run(self, batch, chunk_tokens, z_loss):
        loss, parts = self.model.loss_and_parts(batch, chunk_tokens, z_loss)
        (loss * self.scale).backward()
        self.model.flat.loss_parts.add_(parts * self.scale)
