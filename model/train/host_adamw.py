"""AdamW whose masters and state lie in host memory: they pass through the device in pieces, which it updates."""

import torch

from model.nn.rounding import round_to
from model.train.adamw import AdamW

AT_ONCE = 2**22  # numbers of a piece
SLOTS = 3  # while one is updated, the next arrives and the last returns


class Slot:
    """Float32 buffers on the device for a piece on its way, and events of a GPU that mark how far it is."""

    def __init__(self, numbers, device):
        self.weights, self.gradients, self.averages, self.squares = torch.empty(4, numbers, device=device)
        self.arrived, self.updated, self.returned = (
            torch.cuda.Event() if device.type == "cuda" else None for _ in range(3)
        )


class HostAdamW(AdamW):
    """AdamW with masters (unless these are bf16 weights) and averages in page-locked host memory.

    An update waits until its gradients are known to be finite, and is complete when it returns. Its results are those
    of AdamW on the device.
    """

    obeys_scale = False  # the host gives the device each piece, so no CUDA graph holds an update

    def __init__(self, flat, lr, **options):
        self.copies = flat.copies[flat.own.start : flat.own.stop]
        super().__init__(flat, lr, **options)
        if not self.rounds:
            self._join(flat.own.pieces)
        self.arriving, self.returning = (torch.cuda.Stream(lr.device) if lr.is_cuda else None for _ in range(2))
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

    @staticmethod
    def update_bytes(numbers):
        """Bytes on the device that an update of so many weights takes: its slots."""
        return SLOTS * 4 * 4 * min(numbers, AT_ONCE)

    @torch.no_grad()
    def apply(self, scale):
        """The update, after `next_step`."""
        scales = self.kernel_scales(scale)
        self.counts += scale > 0 if scales else 1
        longest = max((stop - start for _, start, stop in self.pieces), default=0)
        slots = [Slot(longest, self.counts.device) for _ in range(SLOTS)]
        if self.arriving:
            self.arriving.wait_stream(torch.cuda.current_stream())  # which may still use what the slots' memory was
        try:
            for place in range(len(self.pieces) + 1):
                if place < len(self.pieces):
                    self.fetch(place, slots[place % SLOTS])
                if place:
                    self.update_piece(place - 1, slots[(place - 1) % SLOTS], scale, scales)
        finally:  # whoever reads the state or gets the slots' memory need not wait
            for stream in filter(None, (self.arriving, self.returning)):
                stream.synchronize()

    def on_host(self, number):
        """Which of a tensor's weights and averages travel, as (name in a Slot, flat tensor)."""
        weights, _, averages, squares, _ = self.tensors[number]
        masters = [] if self.rounds else [("weights", weights)]
        return [*masters, ("averages", averages), ("squares", squares)]

    def fetch(self, place, slot):
        """Begin to copy a piece to the device."""
        number, start, stop = self.pieces[place]
        with torch.cuda.stream(self.arriving):
            if slot.returned:
                slot.returned.wait()
            for name, flat in self.on_host(number):
                getattr(slot, name)[: stop - start].copy_(flat.view(-1)[start:stop], non_blocking=True)
            if slot.arrived:
                slot.arrived.record()

    def update_piece(self, place, slot, scale, scales):
        """Update a piece once it has arrived, and begin to return it."""
        number, start, stop = self.pieces[place]
        if slot.arrived:
            slot.arrived.wait()
        weights, gradients = (x.view(-1)[start:stop] for x in self.tensors[number][:2])
        updated, in_float32, averages, squares = (
            x[: stop - start] for x in (slot.weights, slot.gradients, slot.averages, slot.squares)
        )
        in_float32.copy_(gradients)
        if not scales:
            in_float32.mul_(scale)
        if self.rounds:
            updated.copy_(weights)
        decay = self.param_groups[0]["weight_decay"] if number >= self.num_others else 0.0
        self.update_part([(updated, in_float32, averages, squares, self.tensors[number][-1])], decay, scales)
        position = self.positions[number] + start
        if not self.rounds:
            self.copies[position - self.first :][: stop - start].copy_(updated)
        elif weights.dtype == torch.float32:
            weights.copy_(updated)
        else:
            round_to(weights, updated, position, self.key)
        self.give_back(slot, number, start, stop)

    def give_back(self, slot, number, start, stop):
        """Begin to copy a piece that the device has updated to the host."""
        if slot.updated:
            slot.updated.record()
        with torch.cuda.stream(self.returning):
            if slot.updated:
                slot.updated.wait()
            for name, flat in self.on_host(number):
                flat.view(-1)[start:stop].copy_(getattr(slot, name)[: stop - start], non_blocking=True)
            if slot.returned:
                slot.returned.record()
