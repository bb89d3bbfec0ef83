"""Texts that wait for their log-probabilities, of which one forward pass takes as many as fit into it."""

import logging
from collections import deque

from model.generate.scoring import score_tokens
from model.runtime.device_memory import release_memory, within_memory

LOGGER = logging.getLogger("chat_trainer")
TOKENS_AT_ONCE = dict(cuda=16_384, cpu=1024)  # answers under way wait for such a pass
FAILED = "the log-probabilities could not be computed; the server's log says why"
TOO_LONG = "out of memory for the log-probabilities of one text: shorten it"


class ScoringQueue:
    """Streams of ScoreRequests, in the order in which they came."""

    def __init__(self, model, first_id):
        self._model, self._first_id, self._waiting = model, first_id, deque()
        self._tokens = TOKENS_AT_ONCE[model.device.type]

    def __len__(self):
        return len(self._waiting)

    def __iter__(self):
        return iter(self._waiting)

    def add(self, stream):
        self._waiting.append(stream)

    def cancel(self, stream):
        """Forget a stream; whether it was waiting."""
        is_waiting = stream in self._waiting
        if is_waiting:
            self._waiting.remove(stream)
        return is_waiting

    def step(self):
        """Score the first of those that wait; a list of (stream, its TokenScores or an exception)."""
        streams = self._first()
        if not streams:
            return []
        try:
            fits, scores = within_memory(
                score_tokens, self._model, self._first_id, [stream.request for stream in streams]
            )
        except Exception:  # of a library: these requests fail, the server goes on
            LOGGER.exception("texts could not be scored")
            return [(stream, RuntimeError(FAILED)) for stream in streams]
        if fits:
            return list(zip(streams, scores, strict=True))
        release_memory()
        if len(streams) == 1:
            return [(streams[0], RuntimeError(TOO_LONG))]
        self._tokens //= 2
        LOGGER.warning("out of memory: texts of %d tokens are scored at a time from now on", self._tokens)
        self._waiting.extendleft(reversed(streams))
        return []

    def _first(self):
        """Take the first streams whose requests have together as many tokens as a pass takes; at least one."""
        taken, tokens = [], 0
        while self._waiting and (not taken or tokens + self._waiting[0].request.num_tokens <= self._tokens):
            tokens += self._waiting[0].request.num_tokens
            taken.append(self._waiting.popleft())
        return taken
