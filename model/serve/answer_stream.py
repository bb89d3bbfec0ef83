"""One answer of the server, as its tokens come: what of it can be shown, why it ended, what it took."""

import asyncio
import time

from model.data.answer_parts import AnswerParts, Said
from model.serve.answering import TextStream
from model.serve.openai_api import StopFilter, usage_of


def reader(chat, asked):
    """The function that takes the pieces of a chat's answer apart."""
    return AnswerParts(chat.opens_thought(asked.thinking), asked.reads_calls, bool(asked.tools)).add


def as_text(piece, is_last):
    """A piece of an answer that is given as it comes, marks and all, as Said."""
    return Said(text=piece)


class AnswerStream:
    """One answer, piece by piece; `reason` and `usage` say afterwards how it ended and what it took.

    `read` gives the Said of each piece of text. The stops count in the text alone, not in thoughts and calls.
    """

    def __init__(self, service, stream, asked, read, prompt_tokens, deadline):
        self.service, self.stream, self.asked, self.read, self.deadline = service, stream, asked, read, deadline
        self.prompt_tokens, self.new_tokens, self.reason = prompt_tokens, 0, "length"
        self.is_over = False  # the piece given now is the last one
        self._stop, self._has_calls = StopFilter(asked.stops), False

    @property
    def usage(self):
        return usage_of(self.prompt_tokens, self.new_tokens)

    async def pieces(self):
        """Yield what can be shown, each a Said. Frees the slot when it ends, fails or is left."""
        metrics, started = self.service.metrics, time.monotonic()
        text = TextStream(self.service.chat.tokenizer)
        try:
            async with asyncio.timeout_at(self.deadline):
                async for progress in self.stream:
                    if not self.new_tokens:
                        metrics.first_token_seconds.observe(time.monotonic() - started)
                    self.new_tokens += len(progress.ids)
                    metrics.new_tokens.inc(len(progress.ids))
                    yield self._shown(text.add(progress.ids), progress.is_finished)
                    if self.is_over:
                        return
        except TimeoutError:  # what is there is the answer
            shown, self.reason = self._shown("", True), "length"
            yield shown
        finally:
            self.service.decoder.cancel(self.stream)
            metrics.request_seconds.observe(time.monotonic() - started)

    def _shown(self, piece, is_last):
        """What to show of a piece of text, a Said; sets `is_over` and `reason`."""
        thought, text, calls = self.read(piece, is_last)
        if self.asked.one_call:
            calls = calls[:1]
        text = self._stop.add(text, is_last)
        self._has_calls = self._has_calls or bool(calls)
        is_stopped = self._stop.is_stopped or bool(calls) and self.asked.one_call
        self.is_over = is_stopped or is_last
        if is_stopped or (is_last and self._ended_itself()):
            self.reason = "tool_calls" if self._has_calls else "stop"
        return Said(thought, text, calls)

    def _ended_itself(self):
        return self.new_tokens < self.stream.request.max_new_tokens


async def collect(answer):
    return [piece async for piece in answer.pieces()]
