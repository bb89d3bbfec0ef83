"""The objectives `dpo`, `orpo` and `simpo`: prefer the chosen response to the rejected one."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from model.data.preference_rows import NEEDS, read_preferences
from model.generate.answer_quality import LOOP_TOKENS
from model.train.objectives.preference_dialogues import DialogueForm
from model.train.objectives.preference_losses import PreferenceLoss
from model.train.objectives.preference_pairs import PairForm

HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio (Knuth, vol. 3, 6.4)


@dataclass(frozen=True)
class Preferences:
    """The PreferenceLoss, a mean over pairs, plus `sft_weight` times the cross-entropy of the chosen responses, a mean
    over their tokens; as `loss` both are reported together.

    With `loops_weight` each pair adds so many times the unlikelihood of what its rejected response repeats (Welleck et
    al. 2020, arXiv 1908.04319): -log(1 - p) of each token that ends a run of LOOP_TOKENS that stood in the
    response before, as a mean over all its tokens. Where a model repeats itself p is about 1: there the preference has
    no gradient, and this has one. `form` says how a network reads a pair. The reference is the network with the weights
    at the run's start.
    """

    form: PairForm | DialogueForm
    loss: PreferenceLoss
    sft_weight: float = 1.0
    loops_weight: float = 0.0

    name = "preferences"
    values = ()
    sequences_per_row, has_answers = 2, True
    needs = NEEDS

    @property
    def metrics(self):
        return (
            "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob",
            *(("chosen_log_ratio", "rejected_log_ratio") if self.loss.needs_reference else ()), "loss",
        )  # fmt: skip

    @property
    def columns(self):
        return self.form.columns

    @property
    def encoding(self):
        return self.form.encoding

    @property
    def derived(self):
        return ("reference_chosen", "reference_rejected") if self.loss.needs_reference else ()

    def read(self, path, columns, ignored):
        """Yield (chosen Conversation, rejected Conversation) of each row."""
        return read_preferences(path, columns, ignored)

    def encode(self, rows, tokenizer, max_seq_len):
        return self.form.encode(rows, tokenizer, max_seq_len)

    def derive(self, model, batch, chunk_tokens):
        return dict(zip(self.derived, response_log_probs(model, batch, chunk_tokens).unbind(1), strict=True))

    def row_tokens(self, max_seq_len):
        return max_seq_len

    def length_bounds(self, lengths):
        return self.form.network_lengths(np.asarray(lengths).astype(np.int64))

    def lengths(self, store, ids, seed, epoch):
        return self.length_bounds(store.lengths[ids])

    def sequences(self, store, ids, seed, epoch):
        """Those of the chosen and of the rejected response of each row, one after the other."""
        sequences, tokens = self.form.sequences(store, ids), self.form.target_tokens(store, ids)
        targets = store.lengths[ids, 1:3].astype(np.int64).ravel()
        references = np.zeros(tokens.shape, np.float32)
        for place, name in enumerate(self.derived):
            references[:, place] = store.values[name][ids]
        token_values = dict(response=np.repeat(np.arange(len(targets), dtype=np.int32), targets))
        if self.loops_weight:
            token_values |= dict(loops=_rejected_loops(sequences, targets, tokens.ravel()))
        return replace(
            sequences,
            token_values=token_values,
            values=dict(
                reference=references.ravel(), tokens=tokens.ravel().astype(np.float32),
                is_real=np.ones(len(targets), np.float32),
            ),
            ids=2 * np.repeat(np.asarray(ids, np.int64), 2) + np.arange(len(targets)) % 2,
        )  # fmt: skip

    def weights(self, store, ids, seed, epoch):
        pairs, (chosen, rejected) = len(ids), self.form.target_tokens(store, ids).sum(axis=0).tolist()
        a_token = (chosen, rejected) * (2 if self.loss.needs_reference else 1)
        return (pairs, chosen), ((pairs,) * 5 + a_token + (chosen,))

    def losses(self, model, batch, chunk_tokens):
        of_tokens = model.token_log_probs(batch, chunk_tokens)
        log_probs = summed(of_tokens, batch)
        tokens, references, is_real = (batch.values[name].view(-1, 2) for name in ("tokens", "reference", "is_real"))
        chosen, rejected = self.loss.scores(log_probs, references, tokens).unbind(1)
        preference = (self.loss.losses(chosen, rejected) * is_real[:, 0]).sum()
        if self.loops_weight:
            preference = preference + self.loops_weight * (unlikelihood(of_tokens) * batch.values["loops"]).sum()
        sums = torch.stack([preference, -self.sft_weight * log_probs[:, 0].sum()])
        rewards = self.loss.beta * torch.stack([chosen - rejected, chosen, rejected]).detach().sum(1)
        accuracy = ((chosen > rejected) * is_real[:, 0]).sum()
        loss, sft = sums.detach()
        a_token = [*log_probs.detach().sum(0)]
        if self.loss.needs_reference:
            a_token += (log_probs.detach() - references).sum(0)
        return sums, torch.stack([loss, accuracy, *rewards, *a_token, sft])

    def questions(self, store, ids):
        return self.form.questions(store, ids)


def response_log_probs(model, batch, chunk_tokens):
    """Log-probability (pairs, 2) of the chosen and the rejected responses of a batch; 0 where it is padded."""
    return summed(model.token_log_probs(batch, chunk_tokens), batch)


def summed(of_tokens, batch):
    """Sums (pairs, 2) of a value of each target, over the chosen and over the rejected responses of a batch."""
    sums = torch.zeros(len(batch.values["tokens"]), device=of_tokens.device)
    return sums.index_add(0, batch.values["response"], of_tokens).view(-1, 2)


def unlikelihood(log_probs):
    """-log(1 - p) of targets with these log-probabilities; a p within 1e-4 of 1 has the value and gradient there."""
    log_probs = log_probs - (log_probs + 1e-4).clamp(min=0).detach()
    return -torch.log(-torch.expm1(log_probs))


def _rejected_loops(sequences, lengths, learnt):
    """float32 (targets,): for a learnt token that ends a run which its rejected response had before, 1 / learnt tokens.

    `lengths` and `learnt` are the tokens, and those of them that are learnt, of the chosen and the rejected response of
    each row, one after the other.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    loops = ends_known_run(sequences.columns[-1], rows, LOOP_TOKENS) & (rows % 2 == 1)
    loops &= True if sequences.is_target is None else sequences.is_target
    return (loops / learnt[rows]).astype(np.float32)


def ends_known_run(ids, rows, size):
    """bool (tokens,): whether the last `size` ids of a row up to here stand earlier in that row, too."""
    places, runs = np.arange(len(ids)), rows.astype(np.uint64)
    for back in range(size):
        runs = runs * HASH_FACTOR + np.concatenate(
            [np.zeros(back, np.uint64), ids[: len(ids) - back].astype(np.uint64)]
        )
    _, first, number = np.unique(runs, return_index=True, return_inverse=True)
    begins = np.maximum.accumulate(np.where(np.diff(rows, prepend=-1) > 0, places, 0))
    return (first[number] < places) & (places - begins >= size - 1)
