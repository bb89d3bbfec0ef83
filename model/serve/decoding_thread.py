"""An Engine on a thread of its own, which answers the requests of many connections together.

Between its steps the thread scores texts (model/serve/scoring_queue.py).
"""

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field, replace

from model.generate.engine import Engine, NewTokens, Request
from model.generate.scoring import ScoreRequest
from model.runtime.device_memory import release_memory, within_memory
from model.serve.scoring_queue import ScoringQueue

LOGGER = logging.getLogger("chat_trainer")
STOP_SECONDS = 20  # in which a step of the largest model on a CPU ends

FAILED = "the answer could not be generated; the server's log says why"
ENDED = "the decoder has ended; the server's log says why: start the server again"


class TooBusy(RuntimeError):
    """Too many requests wait for a slot."""


@dataclass(eq=False)
class Stream:
    """The NewTokens of one request, as it comes, or the TokenScores of a ScoreRequest.

    `queue` gets an exception if the request fails.
    """

    request: Request | ScoreRequest
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)
    num_ids: int = 0  # given to `queue`
    to_skip: int = 0  # ids that a second attempt gives again

    async def __aiter__(self):
        """Yield NewTokens. What has come since the last one is joined: a busy event loop then sends fewer messages."""
        while True:
            items = [await self.queue.get()]
            while not self.queue.empty():
                items.append(self.queue.get_nowait())
            last = items[-1]
            if isinstance(last, Exception):
                raise last
            yield NewTokens(last.number, [i for item in items for i in item.ids], last.is_finished)
            if last.is_finished:
                return

    async def scores(self):
        """The TokenScores of a ScoreRequest."""
        result = await self.queue.get()
        if isinstance(result, Exception):
            raise result
        return result


def put(items):
    """Give each (Stream, NewTokens or exception) of `items` to its stream, with one call of an event loop for all."""
    by_loop = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream.queue, item))
    for loop, given in by_loop.items():
        loop.call_soon_threadsafe(_put_now, given)


def _put_now(items):
    for queue, item in items:
        queue.put_nowait(item)


def launches_ahead(model):
    """Whether its device works while the host goes on; a CPU is through with a step when it is launched."""
    return model.device.type == "cuda"


class DecodingThread(threading.Thread):
    """Owns an Engine. `submit` and `cancel` may be called from any thread; the NewTokens goes to each Stream."""

    def __init__(self, model, limits, max_waiting):
        super().__init__(name="decoding", daemon=True)
        self._model, self._limits, self._max_waiting = model, limits, max_waiting
        self._wakes, self._inbox = threading.Condition(), deque()  # (Stream, whether it is cancelled)
        self._streams = {}  # number in the engine to Stream; this thread's own
        self._scoring = ScoringQueue(model, limits.first_id)  # this thread's own, too
        self._to_put = []  # (Stream, NewTokens) that wait until the device has work
        self.num_open = 0  # submitted and not finished
        self._is_stopping = self._has_failed = False
        self._launches_ahead = launches_ahead(model)

    def submit(self, request):
        """The Stream of a Request or a ScoreRequest, to be read in the running event loop.

        Raises TooBusy, and RuntimeError if the thread has ended.
        """
        with self._wakes:
            if self._has_failed:
                raise RuntimeError(ENDED)
            if self.num_open >= self._limits.slots + self._max_waiting:
                raise TooBusy(f"{self.num_open} requests are being answered or wait: try again later")
            self.num_open += 1
            stream = Stream(request, asyncio.get_running_loop())
            self._inbox.append((stream, False))
            self._wakes.notify()
        return stream

    def cancel(self, stream):
        """Free the slot of a Stream that nobody reads any more; one that has ended may be cancelled too."""
        with self._wakes:
            self._inbox.append((stream, True))
            self._wakes.notify()

    def stop(self):
        """End the thread after the step it is in, and wait for that, at most STOP_SECONDS.

        The interpreter's end would throw a running thread out of torch's C++ code, which aborts the process.
        """
        with self._wakes:
            self._is_stopping = True
            self._wakes.notify()
        self.join(STOP_SECONDS)

    def run(self):
        try:
            self._decode()
        except Exception:  # no client may wait for an answer that nobody makes
            LOGGER.exception("the decoder has ended")
            with self._wakes:
                self._has_failed = True
                left = [stream for stream, is_cancelled in self._inbox if not is_cancelled]
            self._put((stream, RuntimeError(ENDED)) for stream in (*self._streams.values(), *self._scoring, *left))

    def _decode(self):
        engine = self._new_engine()
        while self._admit(engine):
            try:
                fits, progress = within_memory(self._step, engine)
            except Exception:  # of a library: the requests under way fail, the server goes on
                LOGGER.exception("the requests under way failed")
                self._fail(FAILED)
                engine = None
            if engine is None:  # here no traceback keeps the failed step's tensors alive
                engine = self._new_engine()
            elif fits:
                self._deliver(progress)
                if engine.idle or not self._launches_ahead:
                    self._put()
            else:
                engine = self._smaller(engine)
            self._score()

    def _score(self):
        """Score some of the texts that wait."""
        items = self._scoring.step()
        with self._wakes:
            self.num_open -= len(items)
        put(items)

    def _step(self, engine):
        """A step of the engine. On a GPU the event loop gets what the last step gave while the device works.

        Else this thread, which gives up the interpreter at each operation, would launch the step only when the event
        loop, which does not, is through with its streams.
        """
        engine.launch()
        self._put()
        return engine.collect()

    def _new_engine(self):
        """An Engine with as many slots as memory allows; raises RuntimeError if it does not allow one."""
        while True:
            release_memory()
            fits, engine = within_memory(Engine, self._model, self._limits)
            if fits:
                return engine
            if self._limits.slots == 1:
                raise RuntimeError("out of memory for one answer: lower the most tokens of a prompt or an answer")
            self._halve()

    def _halve(self):
        self._limits = replace(self._limits, slots=max(self._limits.slots // 2, 1))
        LOGGER.warning("out of memory: %d answers at a time from now on", self._limits.slots)

    def _admit(self, engine):
        """Take what `submit` and `cancel` left, waiting while there is nothing to do; False if the thread is to end."""
        with self._wakes:
            while not (self._inbox or self._is_stopping or self._scoring or not engine.idle):
                self._wakes.wait()
            inbox, self._inbox = self._inbox, deque()
        for stream, is_cancelled in inbox:
            if isinstance(stream.request, ScoreRequest):
                self._admit_scored(stream, is_cancelled)
            elif not is_cancelled:
                self._streams[engine.add(stream.request)] = stream
            else:
                for number in [number for number, other in self._streams.items() if other is stream]:
                    engine.cancel(number)
                    self._close(number)
        return not self._is_stopping

    def _admit_scored(self, stream, is_cancelled):
        if not is_cancelled:
            self._scoring.add(stream)
        elif self._scoring.cancel(stream):
            with self._wakes:
                self.num_open -= 1

    def _deliver(self, progress):
        for each in progress:
            stream = self._streams[each.number]
            ids = each.ids[stream.to_skip :]
            stream.to_skip -= len(each.ids) - len(ids)
            stream.num_ids += len(ids)
            if each.is_finished:
                self._close(each.number)
            self._to_put.append((stream, NewTokens(each.number, ids, each.is_finished)))

    def _put(self, items=()):
        """Give the streams what waits for them, and then `items`."""
        given, self._to_put = [*self._to_put, *items], []
        put(given)

    def _close(self, number):
        del self._streams[number]
        with self._wakes:
            self.num_open -= 1

    def _fail(self, message):
        items = [(stream, RuntimeError(message)) for stream in self._streams.values()]
        for number in list(self._streams):
            self._close(number)
        self._put(items)

    def _smaller(self, engine):
        """An Engine with half the slots that begins the open requests again; their streams go on where they were."""
        if engine.limits.slots == 1:
            self._fail("out of memory for one answer: lower the most tokens of a prompt or an answer")
        self._halve()
        streams = list(self._streams.values())
        engine.cache = engine.slots = engine.graphs = None
        engine = self._new_engine()
        self._streams = {}
        for stream in streams:
            stream.to_skip = stream.num_ids
            self._streams[engine.add(stream.request)] = stream
        return engine
