"""Forward and backward of a micro-batch, and the update, as CUDA graphs: recorded once, then replayed in one call.

A step of the model `small` launches about a thousand kernels. On a fast GPU, with fewer than about 40,000 tokens, the
launches take longer than the kernels.
"""

import torch

from model.runtime.recorder import Recorder
from model.train.weighted_loss import weighted_loss


class StepGraphs:
    """CUDA graphs: one per Bucket, that writes a micro-batch's gradients and metrics to the model's flat tensors, and
    one of the optimizer's update.

    They share one memory pool, which is held until `clear`, with the forwards that fit no Bucket.
    """

    def __init__(self, model, objective):
        self.model, self.objective = model, objective
        self.scales = None  # tensors (losses,) and (metrics,) on the device, which the graphs read
        self.recorded, self.recorded_update, self.recorder = {}, None, Recorder()

    def clear(self):
        """Delete all recorded graphs and free their memory."""
        self.recorder.stream.synchronize()  # a replay may still be running
        self.recorded, self.recorded_update, self.recorder = {}, None, Recorder()

    def run(self, work, *args):
        """Do `work(*args)`, which keeps no tensor that it makes, in the memory that the graphs share."""
        self.recorder.run_in_pool(work, *args)

    def gradients(self, micro_batch, bucket, chunk_tokens, scales):
        """Write the gradients and metrics of a micro-batch to the model's flat tensors, which must be zero.

        `scales` holds a factor for each loss sum, and for each metric sum.
        """
        self._set(scales)
        key = (bucket, chunk_tokens, self.model.gradient_checkpointing)
        if key not in self.recorded:
            self.recorded[key] = self._record_gradients(micro_batch, chunk_tokens)
        batch, graph = self.recorded[key]
        batch.flat.data.copy_(micro_batch.flat.data, non_blocking=True)
        graph.replay()

    def _set(self, scales):
        if self.scales is None:
            self.scales = tuple(torch.zeros(len(part), device=self.model.device) for part in scales)
        for tensor, part in zip(self.scales, scales, strict=True):
            for element, number in zip(tensor, part, strict=True):
                element.fill_(number)

    def record_update(self, optimizer):
        """Record the update of an optimizer that obeys its scale, for `update`, if that is not done yet."""
        if self.recorded_update is None:
            scale = torch.zeros((), device=self.model.device)  # 0: the first run changes nothing
            self.recorded_update = scale, self._record(optimizer.apply, scale)

    def update(self, scale):
        """Replay the optimizer's `apply`."""
        own_scale, graph = self.recorded_update
        own_scale.copy_(scale)
        graph.replay()

    def _record_gradients(self, micro_batch, chunk_tokens):
        """(the batch that the graph reads, the graph)."""
        batch = micro_batch.to(self.model.device)
        graph = self._record(self._run, batch, chunk_tokens)
        self.model.zero_grad()
        return batch, graph

    def _record(self, work, *args):
        self.recorder.run_in_pool(work, *args)
        torch.cuda.synchronize()
        return self.recorder.record(work, *args)

    def _run(self, batch, chunk_tokens):
        weighted_loss(self.model, self.objective, batch, chunk_tokens, self.scales).backward()
