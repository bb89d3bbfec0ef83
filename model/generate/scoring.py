"""Log-probabilities of given tokens after given contexts, through packed forward passes; knows no run.

Letters: N target tokens, K ids looked at for each, V vocabulary size.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from model.data.sequences import Sequences
from model.nn.base import Packing
from model.nn.registry import family_of
from model.runtime.device_memory import release_memory, within_memory

TOKENS_AT_ONCE = dict(cuda=32_768, cpu=2048)  # of a forward pass, where nobody waits for other work
NUMBERS_AT_ONCE = 2**24  # float32 log-probabilities that exist together, of all N * V


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens to score: `targets` after `context`, each of at least one id."""

    context: object  # array or list of ids
    targets: object
    top: int = 1  # ids that are named at the place of each target, the likeliest first

    @property
    def num_tokens(self):
        return len(self.context) + len(self.targets)


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities in nats at the places of one request's targets."""

    log_probs: np.ndarray  # float32 (targets,) of the targets
    top_ids: np.ndarray  # int64 (targets, top) the likeliest ids
    top_log_probs: np.ndarray  # float32 (targets, top)

    @property
    def is_greedy(self):
        """Whether greedy decoding would give these targets: none is less likely than the likeliest id."""
        return bool((self.log_probs == self.top_log_probs[:, 0]).all())


@torch.inference_mode()
def score_tokens(model, first_id, requests):
    """The TokenScores of each of `requests`, all in one forward pass; `first_id` begins a sequence of targets."""
    hidden, labels = _hidden(model, first_id, [r.context for r in requests], [r.targets for r in requests])
    most, parts = max(request.top for request in requests), []
    for rows, log_probs_CV in _log_prob_chunks(model, hidden):
        of_labels = log_probs_CV.gather(1, labels[rows, None])
        values, ids = log_probs_CV.topk(most, dim=1)
        parts.append((torch.cat([of_labels, values], 1), ids))
    numbers, ids = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    ends = np.cumsum([len(request.targets) for request in requests])[:-1]
    each = zip(requests, np.split(numbers, ends), np.split(ids, ends), strict=True)
    return [TokenScores(n[:, 0], i[:, : r.top], n[:, 1 : r.top + 1]) for r, n, i in each]


@torch.inference_mode()
def score_next(model, first_id, contexts, prefixes, candidates_NK):
    """Log-probabilities (N, K) float32 of the ids `candidates_NK` after each context; one forward pass.

    Of each context, `prefixes` has the ids that every candidate begins with.
    """
    # which candidate stands at the end changes nothing before it
    targets = [[*prefix, candidates[0]] for prefix, candidates in zip(prefixes, candidates_NK, strict=True)]
    hidden, _ = _hidden(model, first_id, contexts, targets)
    last = torch.from_numpy(np.cumsum([len(ids) for ids in targets]) - 1).to(hidden.device)
    hidden, ids = hidden[last], torch.from_numpy(np.asarray(candidates_NK, np.int64)).to(hidden.device)
    parts = [log_probs_CV.gather(1, ids[rows]) for rows, log_probs_CV in _log_prob_chunks(model, hidden)]
    return torch.cat(parts).cpu().numpy()


def _hidden(model, first_id, contexts, targets):
    """(hidden states (N, width), labels (N,)) of all targets."""
    lengths = np.array([[len(c), len(t)] for c, t in zip(contexts, targets, strict=True)])
    sides = tuple(np.concatenate([np.asarray(ids, np.int64) for ids in side]) for side in (contexts, targets))
    packing = Packing(first_id, model.uses_kernels)
    return model.hidden(family_of(model.config).collate(Sequences(sides, lengths), packing).to(model.device))


def _log_prob_chunks(model, hidden):
    """Yield (slice of the rows of `hidden`, their log-probabilities (C, V) float32)."""
    chunk = max(NUMBERS_AT_ONCE // model.config.vocab_size, 1)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        yield rows, model.logits(hidden[rows]).float().log_softmax(dim=1)


def score_all(model, first_id, requests, tokens):
    """The TokenScores of each of `requests`, of which a forward pass takes about so many `tokens`.

    A pass that runs out of memory is done again in halves; raises RuntimeError if one request by itself does not fit.
    """
    done, left = [], deque(packed(requests, tokens))
    while left:
        part = left.popleft()
        fits, scores = within_memory(score_tokens, model, first_id, part)
        if fits:
            done += scores
            continue
        release_memory()
        if len(part) == 1:
            raise RuntimeError(f"out of memory for one text of {part[0].num_tokens} tokens: shorten it")
        half = len(part) // 2
        left.extendleft((part[half:], part[:half]))
    return done


def packed(requests, tokens):
    """Yield lists of neighbouring `requests` that together have at most so many `tokens`, or are one request."""
    part, size = [], 0
    for request in requests:
        if part and size + request.num_tokens > tokens:
            yield part
            part, size = [], 0
        part.append(request)
        size += request.num_tokens
    if part:
        yield part
