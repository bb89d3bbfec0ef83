"""AdamW whose masters and state lie in host memory: the CPU updates them, piece by piece, while others travel."""

import os

import torch

from model.nn.rounding import round_to
from model.runtime.cgroup import num_cpus
from model.train.adamw import AdamW

AT_ONCE = 2**23  # numbers of a piece
SLOTS = 2  # while one is updated, the gradients of the next arrive and the weights of the last return


class Slot:
    """Page-locked buffers of one piece on its way, and events of a GPU that mark its arrival and its return."""

    def __init__(self, numbers, gradients, copies, on_gpu):
        """As long as `numbers`, of the dtypes of these flat `gradients` and `copies`."""
        self.gradients = torch.empty(numbers, dtype=gradients.dtype, pin_memory=on_gpu)
        self.weights = torch.empty(numbers, dtype=copies.dtype, pin_memory=on_gpu)
        self.arrived, self.returned = (torch.cuda.Event() if on_gpu else None for _ in range(2))


class HostAdamW(AdamW):
    """AdamW with masters (unless these are bf16 weights) and averages in host memory.

    An update waits until its gradients are known to be finite, and is complete when it returns, but for the weights
    that still travel before whatever the device does next.
    """

    obeys_scale = False  # the host updates, so no CUDA graph holds it

    def __init__(self, flat, lr, **options):
        self.copies = flat.copies[flat.own.start : flat.own.stop]
        super().__init__(flat, lr.cpu(), **options)
        if not self.rounds:
            self._join(flat.own.pieces)
        on_gpu = self.copies.is_cuda
        if on_gpu:  # torchrun gives each of several processes one thread
            torch.set_num_threads(max(num_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1))
        longest = min(max((tensors[0].numel() for tensors in self.tensors), default=0), AT_ONCE)
        self.slots = [Slot(longest, self.gradients, self.copies, on_gpu) for _ in range(SLOTS)]
        self.pieces = [
            (number, start, min(start + AT_ONCE, tensors[0].numel()))
            for number, tensors in enumerate(self.tensors)
            for start in range(0, tensors[0].numel(), AT_ONCE)
        ]

    def _join(self, pieces):
        """Make one tensor of those that do not decay and one of the others: small ones travel and are updated together.

        They are adjacent, and zeros between them stay zeros.
        """
        start = pieces[self.num_others].at if self.num_others < len(pieces) else len(self.weights)
        flats, parts = (self.weights, self.gradients, self.averages, self.squares), []
        for part in (slice(0, start), slice(start, None)):
            if len(self.weights[part]):
                parts.append((part.start, (*(flat[part] for flat in flats), self.counts[len(pieces) - 1])))
        self.num_others = sum(at < start for at, _ in parts)
        self.tensors, self.positions = [tensors for _, tensors in parts], [self.first + at for at, _ in parts]

    def new_state(self):
        """As AdamW.new_state, in host memory."""
        return torch.zeros(len(self.gradients), pin_memory=self.gradients.is_cuda)

    @torch.no_grad()
    def apply(self, scale):
        """The update, after `next_step`; the device has its weights by the work that it is given next."""
        factor = float(scale)
        self.counts += 1
        for place in range(len(self.pieces) + 1):
            if place < len(self.pieces):
                self.fetch(place)
            if place:
                self.update_piece(place - 1, factor)

    def fetch(self, place):
        """Begin to copy the gradients of a piece, and weights that have no masters, to the host."""
        slot, (number, start, stop) = self.slots[place % SLOTS], self.pieces[place]
        weights, gradients, *_ = self.tensors[number]
        if slot.returned:
            slot.returned.synchronize()
        if gradients.dtype == slot.gradients.dtype:
            slot.gradients[: stop - start].copy_(gradients.view(-1)[start:stop], non_blocking=True)
        if weights.dtype != torch.float32:
            slot.weights[: stop - start].copy_(weights.view(-1)[start:stop], non_blocking=True)
        if slot.arrived:
            slot.arrived.record()

    def update_piece(self, place, factor):
        """Update a piece whose gradients have arrived, and begin to return its weights."""
        slot, (number, start, stop) = self.slots[place % SLOTS], self.pieces[place]
        if slot.arrived:
            slot.arrived.synchronize()
        *tensors, count = self.tensors[number]
        weights, gradients, averages, squares = (x.view(-1)[start:stop] for x in tensors)
        arrived, returned = slot.gradients[: stop - start], slot.weights[: stop - start]
        # those that are in float32 where the others are in bf16 are few
        gradients = (arrived if gradients.dtype == arrived.dtype else gradients.cpu()).float().mul_(factor)
        updated = weights.cpu() if weights.dtype == torch.float32 else returned.float()  # itself, if it is on the host
        decay = self.param_groups[0]["weight_decay"] if number >= self.num_others else 0.0
        self.update_part([(updated, gradients, averages, squares, count)], decay, {})
        position = self.positions[number] + start
        if weights.dtype == torch.float32:
            weights.copy_(updated)
            returned.copy_(updated)
        else:
            round_to(returned, updated, position, self.key)
        self.copies[position - self.first :][: stop - start].copy_(returned, non_blocking=True)
        if slot.returned:
            slot.returned.record()
