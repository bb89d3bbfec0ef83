"""Decoding state on the device: the ids of every slot and how its next token is chosen. Letters: S slots, W columns."""

import torch

from model.generate.sampling import SlotSettings, choose


class Slots:
    """Tensors with a row for each slot, S of them, each for at most `ids` ids.

    `history` (S, W) holds the id that a slot decodes from, then the generated ones, the newest at column `count`;
    `last` is the column of the last one allowed.
    """

    def __init__(self, slots, ids, device):
        def zeros(*size):
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.history = zeros(slots, ids + 1)  # the last column takes what finished slots decode
        self.count, self.last = zeros(slots), zeros(slots)
        self.is_done = torch.ones(slots, dtype=torch.bool, device=device)
        self.settings = SlotSettings(slots, device)

    def first(self, slots):
        """The first `slots` slots, sharing their memory."""
        view = object.__new__(Slots)
        vars(view).update({name: x.first(slots) if name == "settings" else x[:slots] for name, x in vars(self).items()})
        return view

    def put(self, slots, first, requests):
        """Write `requests` into `slots` (list of numbers); `first` holds the id that each decodes from."""
        device = self.history.device
        slots = torch.tensor(slots, device=device)
        self.history[slots, 0] = torch.tensor(first, device=device)
        self.count[slots] = 0
        self.last[slots] = torch.tensor([request.max_new_tokens for request in requests], device=device)
        self.is_done[slots] = False
        self.settings.put(slots, [request.sampling for request in requests])

    def advance(self, model, cache, mode, eos_id):
        """Decode one token in every slot; on a GPU shapes are fixed and nothing is read on the host."""
        ids = self.history.gather(1, self.count[:, None])[:, 0]
        logits = model.logits(model.decode_one(ids, cache))
        ids = choose(logits, self.history, self.count, self.settings, mode)
        column = torch.where(self.is_done, self.history.shape[1] - 1, self.count + 1)
        self.history.scatter_(1, column[:, None], ids[:, None])
        self.count += ~self.is_done
        self.is_done |= (ids == eos_id) | (self.count >= self.last)

    def read(self, slots, wanted):
        """{slot: (its ids, whether it is done)} of `slots` (a list), of those that are done or in the set `wanted`."""
        rows = torch.tensor(slots, device=self.count.device)
        counts, done = torch.stack([self.count[rows], self.is_done[rows]]).tolist()
        kept = [i for i, slot in enumerate(slots) if done[i] or slot in wanted]
        if not kept:
            return {}
        history = self.history[rows[kept], : max(counts[i] for i in kept) + 1].tolist()
        return {slots[i]: (ids[: counts[i] + 1], bool(done[i])) for i, ids in zip(kept, history, strict=True)}
