"""An objective for tests: prefer the chosen response to the rejected one (DPO; Rafailov et al. 2023)."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from model.data.sequences import Sequences
from model.data.token_store import Encoded


@dataclass(frozen=True)
class Preference:
    """-log sigmoid(beta * (margin of the policy - margin of the reference)), a mean over rows."""

    beta: float = 0.5

    name, encoding = "preference", ""
    columns, values, derived = ("prompt_ids", "chosen_ids", "rejected_ids"), (), ("reference_margin",)
    metrics, sequences_per_row, has_answers = ("loss", "accuracy"), 2, True
    needs = "a prompt, a chosen and a rejected response"

    def read(self, path, columns, ignored):
        rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        return ((row["prompt"], row["chosen"], row["rejected"]) for row in rows)

    def encode(self, rows, tokenizer, max_seq_len):
        ids = [tokenizer.encode_batch(list(column)) for column in zip(*rows, strict=True)]
        return Encoded([[[*x[: max_seq_len - 1], tokenizer.eos_id] for x in column] for column in ids], [0, 0, 0], {})

    def derive(self, model, batch, chunk_tokens):
        chosen, rejected = _log_probs(model, batch, chunk_tokens).T
        return dict(reference_margin=chosen - rejected)

    def row_tokens(self, max_seq_len):
        return max_seq_len

    def length_bounds(self, lengths):
        prompt, chosen, rejected = np.asarray(lengths).astype(np.int64).T
        return np.stack([2 * prompt, chosen + rejected], axis=1)

    def lengths(self, store, ids, seed, epoch):
        return self.length_bounds(store.lengths[ids])

    def sequences(self, store, ids, seed, epoch):
        parts = [
            np.split(flat, np.cumsum(lengths)[:-1])
            for flat, lengths in zip(store.tokens(ids), store.lengths[ids].astype(np.int64).T, strict=True)
        ]
        each = np.repeat(np.asarray(ids, np.int64), 2)
        prompts = [prompt for prompt in parts[0] for _ in range(2)]
        answers = [answer for both in zip(parts[1], parts[2], strict=True) for answer in both]
        lengths = np.array([[len(x) for x in column] for column in (prompts, answers)]).T
        margins = np.asarray(store.values["reference_margin"][ids], np.float32)
        return Sequences(
            (np.concatenate(prompts), np.concatenate(answers)), lengths,
            token_values=dict(sequence=np.repeat(np.arange(len(answers), dtype=np.int32), lengths[:, 1])),
            values=dict(margin=np.repeat(margins, 2), is_real=np.ones(len(answers), np.float32)),
            ids=2 * each + np.arange(len(each)) % 2,
        )  # fmt: skip

    def weights(self, store, ids, seed, epoch):
        return (len(ids),), (len(ids), len(ids))

    def losses(self, model, batch, chunk_tokens):
        chosen, rejected = _log_probs(model, batch, chunk_tokens).T
        margins = chosen - rejected - batch.values["margin"][::2]
        is_real = batch.values["is_real"][::2]
        loss = (-F.logsigmoid(self.beta * margins) * is_real).sum()
        return loss[None], torch.stack([loss.detach(), ((margins > 0) * is_real).sum()])

    def questions(self, store, ids):
        columns = zip(store.tokens(ids), store.lengths[ids].astype(np.int64).T, strict=True)
        return [np.split(flat, np.cumsum(lengths)[:-1]) for flat, lengths in columns][:2]


def _log_probs(model, batch, chunk_tokens):
    """(rows, 2): log-probability of the chosen and of the rejected response."""
    tokens = model.token_log_probs(batch, chunk_tokens)
    sums = torch.zeros(len(batch.values["margin"]), device=tokens.device)
    return sums.index_add(0, batch.values["sequence"], tokens).view(-1, 2)
