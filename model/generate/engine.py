"""Generation with continuous batching: requests wait in a queue, and a slot that has finished takes the next one.

All slots decode one token at a time, together. On a GPU that step is captured as a CUDA graph, one for each size of
the slots and answers in use, because launching its kernels would take several times longer than running them.
"""

from collections import deque
from dataclasses import dataclass

import torch

from model.generate.sampling import GREEDY, Sampling, mode_of
from model.generate.slots import Slots
from model.runtime.graph_capture import GraphCapture
from model.runtime.watchdog import stop_asked

STEPS_BETWEEN_CHECKS = 8  # reading on the host which slots are done waits for the device
MIN_SLOTS, MIN_TOKENS, GROWTH = 32, 32, 4  # smallest sizes of a captured step, and how they grow
REFILL_SHARE = 8  # while more requests wait than slots are free, slots / REFILL_SHARE are filled together (no streams)


@dataclass(frozen=True)
class Limits:
    """Sizes of an Engine, and the ids that begin and end an answer."""

    slots: int  # answers generated together
    input_tokens: int  # of a request, at most
    new_tokens: int  # of an answer, at most
    first_id: int  # that a sequence of targets begins with
    eos_id: int


@dataclass(frozen=True)
class Request:
    input_ids: object  # array or list of ids, at least one
    max_new_tokens: int
    sampling: Sampling = GREEDY
    streams: bool = False  # report tokens as they come, not only when all are there


@dataclass(frozen=True)
class NewTokens:
    """What a request got since the last NewTokens; `ids` are without EOS."""

    number: int
    ids: list[int]
    is_finished: bool


@dataclass
class Running:
    """A request in a slot."""

    number: int
    request: Request
    reported: int = 1  # ids of the slot's history that the caller has; the first is none of the answer's
    decoded: int = 0  # tokens, since the slot was filled

    @property
    def tokens_left(self):
        return self.request.max_new_tokens - self.decoded


class Engine:
    """Decodes requests in slots that it refills: `add` them, then `step` until it is `idle`."""

    def __init__(self, model, limits):
        self.model, self.limits = model, limits
        self.cache = model.new_cache(limits.slots, limits.input_tokens, limits.new_tokens)
        self.slots = Slots(limits.slots, limits.new_tokens + 1, model.device)
        self.waiting = deque()  # (number, Request)
        self.running = {}  # slot to Running
        self.num_added = 0
        self.graphs = DecodingGraphs() if model.device.type == "cuda" else None

    @property
    def idle(self):
        return not (self.waiting or self.running)

    def add(self, request):
        """Queue a Request, which must be within the limits; returns its number."""
        assert 0 < len(request.input_ids) <= self.limits.input_tokens
        assert 0 < request.max_new_tokens <= self.limits.new_tokens
        self.waiting.append((self.num_added, request))
        self.num_added += 1
        return self.num_added - 1

    def cancel(self, number):
        """Forget a request; its slot is free for another one."""
        self.waiting = deque(pair for pair in self.waiting if pair[0] != number)
        for slot in [slot for slot, running in self.running.items() if running.number == number]:
            self._free(slot)

    def step(self):
        """Fill free slots and decode a few tokens in each; returns a list of NewTokens."""
        self.launch()
        return self.collect()

    @torch.inference_mode()
    def launch(self):
        """The part of a step that gives the device its work."""
        self._fill()
        if not self.running:
            return
        steps = min(STEPS_BETWEEN_CHECKS, max(running.tokens_left for running in self.running.values()))
        self._decode(steps)
        for running in self.running.values():
            running.decoded += steps

    def _fill(self):
        free = [slot for slot in range(self.limits.slots) if slot not in self.running]
        if not self.waiting or not free:
            return
        is_full = len(self.waiting) > len(free) and len(free) * REFILL_SHARE < self.limits.slots
        if is_full and not self.waiting[0][1].streams:  # somebody waits for the first word of a stream
            return
        numbers, requests = zip(*(self.waiting.popleft() for _ in free[: len(self.waiting)]), strict=True)
        slots = free[: len(requests)]
        first = self.model.prefill([r.input_ids for r in requests], self.cache, slots, self.limits.first_id)
        self.slots.put(slots, first, requests)
        for slot, number, request in zip(slots, numbers, requests, strict=True):
            self.running[slot] = Running(number, request)

    def _decode(self, steps):
        """Decode `steps` tokens in the smallest step that holds the running slots."""
        limits, running, size = self.limits, self.running.values(), self._size(steps)
        mode = mode_of([one.request.sampling for one in running], self.model.config.vocab_size)
        view, cache = self.slots.first(size[0]), self.cache.first(*size)

        def advance():
            view.advance(self.model, cache, mode, limits.eos_id)

        for _ in range(steps):
            if self.graphs:
                self.graphs.run((size, mode), advance)
            else:
                advance()

    def _size(self, steps):
        """(slots, input tokens, new tokens) of the smallest step that holds the running slots for `steps` tokens.

        CUDA graphs have few sizes; of a cache that is read only where it is used, they need the slots alone.
        """
        limits, running = self.limits, self.running.values()
        slots = max(self.running) + 1
        inputs = max(len(one.request.input_ids) for one in running)
        new = max(one.decoded for one in running) + steps
        if not self.graphs:
            return slots, inputs, new
        slots = _rounded(slots, MIN_SLOTS, limits.slots)
        if not self.cache.reads_all:
            return slots, limits.input_tokens, limits.new_tokens
        return slots, _rounded(inputs, MIN_TOKENS, limits.input_tokens), _rounded(new, MIN_TOKENS, limits.new_tokens)

    @torch.inference_mode()
    def collect(self):
        """The part of a step that waits for the device; returns a list of NewTokens."""
        if not self.running:
            return []
        wanted = {slot for slot, running in self.running.items() if running.request.streams}
        progress = []
        for slot, (history, is_done) in self.slots.read(list(self.running), wanted).items():
            running = self.running[slot]
            ids = history[running.reported :]
            running.reported = len(history)
            if is_done:
                self._free(slot)
            if ids and ids[-1] == self.limits.eos_id:
                ids.pop()
            progress.append(NewTokens(running.number, ids, is_done))
        return progress

    def _free(self, slot):
        del self.running[slot]
        self.slots.is_done[slot] = True


def _rounded(number, least, most):
    """The first of `least`, GROWTH times as much and so on that holds `number`, or `most`."""
    while least < number:
        least *= GROWTH
    return min(least, most)


class DecodingGraphs:
    """CUDA graphs by key, of work that is done again and again."""

    def __init__(self):
        self.graphs, self.capturer = {}, GraphCapture()

    def run(self, key, work):
        """Do `work`: the first time by calling it, the second time by capturing it, then by replaying the graph."""
        if key not in self.graphs:
            self.graphs[key] = None
            self.capturer.run(work)
            return
        if self.graphs[key] is None:
            self.graphs[key] = self.capturer.capture(work)
        self.graphs[key].replay()


def generate(model, inputs, limits, max_new_tokens, sampling=GREEDY):
    """For each of `inputs` (arrays of ids), a list of the ids that follow it, without the EOS that ends it.

    Generates at most `max_new_tokens` tokens each. Once a stop is requested, unfinished answers are empty.
    """
    return answer_requests(model, [Request(ids, max_new_tokens, sampling) for ids in inputs], limits)


def answer_requests(model, requests, limits, is_over=stop_asked):
    """The ids that answer each of `requests`, without EOS; once `is_over()`, unfinished answers are empty."""
    was_training = model.training
    model.eval()
    answers = [[] for _ in requests]
    # neighbouring slots get inputs of similar length: a CPU reads those of a group of slots up to the longest
    shortest_first = sorted(range(len(requests)), key=lambda place: len(requests[place].input_ids))
    try:
        engine = Engine(model, limits)
        for place in shortest_first:
            engine.add(requests[place])
        while not engine.idle and not is_over():
            for progress in engine.step():
                answers[shortest_first[progress.number]] = progress.ids
    finally:
        model.train(was_training)
    return answers
