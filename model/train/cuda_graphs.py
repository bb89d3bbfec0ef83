"""Forward and backward of a micro-batch, and the update, as CUDA graphs: captured once, then replayed in one call.

A step of the model `small` launches about a thousand kernels. On a fast GPU, with fewer than about 40,000 tokens, the
launches take longer than the kernels.
"""

from dataclasses import dataclass

import torch

from model.nn.gradient_parts import reporting
from model.runtime.graph_capture import GraphCapture
from model.train.weighted_loss import weighted_loss


@dataclass
class CapturedStep:
    """A captured forward and backward; what the tensors and events say is of its last replay."""

    batch: object  # that the graph reads
    norms: torch.Tensor | None  # of the metrics and of the last part, for ranks that send the others while it runs
    ready: dict  # {number of one of the model's gradient_parts: event after which it is written}
    events: list  # all that the graph records
    graph: torch.cuda.CUDAGraph | None = None


class StepGraphs:
    """CUDA graphs: one per Bucket, that writes a micro-batch's gradients and metrics to the model's flat tensors, and
    one of the optimizer's update.

    They share one memory pool, which is held until `clear`, with the forwards that fit no Bucket. `in_parts`: a replay
    tells when each of the model's gradient_parts is written, as a rank among several needs.
    """

    def __init__(self, model, objective, in_parts=False):
        self.model, self.objective = model, objective
        self.parts = model.gradient_parts if in_parts else []
        self.scales = None  # tensors (losses,) and (metrics,) on the device, which the graphs read
        self.captured, self.captured_update, self.capturer = {}, None, GraphCapture()

    def clear(self):
        """Delete all captured graphs and free their memory."""
        torch.cuda.synchronize(self.model.device)  # a replay may still be running, on the stream of its caller
        self.captured, self.captured_update, self.capturer = {}, None, GraphCapture()

    def run(self, work, *args):
        """Do `work(*args)`, which keeps no tensor that it makes, in the memory that the graphs share."""
        self.capturer.run_in_pool(work, *args)

    def reserve(self, micro_batch, chunk_tokens, scales):
        """Write the gradients of the largest micro-batch, before any is captured: the pool then has room for all.

        One that grows from size to size cannot join its pieces (bench/results/preferences.md).
        """
        self._set(scales)
        self.capturer.run_in_pool(self._run, self._step_on(micro_batch), chunk_tokens)

    def gradients(self, micro_batch, bucket, chunk_tokens, scales):
        """Write the gradients and metrics of a micro-batch to the model's flat tensors, which must be zero.

        `scales` holds a factor for each loss sum, and for each metric sum. Returns the CapturedStep.
        """
        self._set(scales)
        key = (bucket, chunk_tokens, self.model.gradient_checkpointing)
        if key not in self.captured:
            self.captured[key] = self._capture_gradients(micro_batch, chunk_tokens)
        captured = self.captured[key]
        captured.batch.flat.data.copy_(micro_batch.flat.data, non_blocking=True)
        captured.graph.replay()
        return captured

    def _set(self, scales):
        if self.scales is None:
            self.scales = tuple(torch.zeros(len(part), device=self.model.device) for part in scales)
        for tensor, part in zip(self.scales, scales, strict=True):
            for element, number in zip(tensor, part, strict=True):
                element.fill_(number)

    def capture_update(self, optimizer):
        """Capture the update of an optimizer that obeys its scale, for `update`, if that is not done yet."""
        if self.captured_update is None:
            scale = torch.zeros((), device=self.model.device)  # 0: the first run changes nothing
            self.captured_update = scale, self._capture(optimizer.apply, scale)

    def update(self, scale):
        """Replay the optimizer's `apply`."""
        own_scale, graph = self.captured_update
        own_scale.copy_(scale)
        graph.replay()

    def _capture_gradients(self, micro_batch, chunk_tokens):
        captured = self._step_on(micro_batch)
        captured.graph = self._capture(self._run, captured, chunk_tokens)
        self.model.zero_grad()
        return captured

    def _step_on(self, micro_batch):
        norms = torch.zeros(2, device=self.model.device) if self.parts else None
        return CapturedStep(micro_batch.to(self.model.device), norms, {}, [])

    def _capture(self, work, *args):
        self.capturer.run_in_pool(work, *args)
        torch.cuda.synchronize()
        return self.capturer.capture(work, *args)

    def _run(self, captured, chunk_tokens):
        """Forward and backward, which record the events of the CapturedStep anew."""
        flat = self.model.flat
        captured.ready.clear()
        captured.events.clear()

        def report(number):
            captured.events.append(torch.cuda.Event(external=True))
            captured.events[-1].record()
            captured.ready[number] = captured.events[-1]

        with reporting(self.parts, report):
            loss = weighted_loss(self.model, self.objective, captured.batch, chunk_tokens, self.scales)
        if self.parts:
            captured.norms[0] = flat.sums.norm()  # before they are sent, with another part
        loss.backward()
        if self.parts:  # a number of backward that is not finite reaches the first blocks
            captured.norms[1] = flat.gradient_norms(self.parts[-1].ranges).norm()
        for number in set(range(len(self.parts))) - set(captured.ready):
            report(number)
