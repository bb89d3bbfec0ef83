"""The HTTP server of a trained model: OpenAI's interface, a page to talk to it, the curves of its run.

The requests of all connections are decoded together by one DecodingThread; this module runs on the event loop and
waits for it.
"""

import asyncio
import contextlib
import hmac
import json
import time
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from model.commands.request_body import Refused, read_json
from model.display.catalogue import CATALOGUE
from model.display.curves import curves_of
from model.generate.engine import Request
from model.serve.answering import ChatModel, TextStream, prompt_ids
from model.serve.decoding_thread import DecodingThread, TooBusy
from model.serve.openai_api import Reply, StopFilter, error_body, parse_chat, parse_completion, usage_of
from model.serve.server_metrics import ServerMetrics

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
DISCONNECT_SECONDS = 0.5  # between two looks whether a client that waits for a whole answer is still there


@dataclass(frozen=True)
class Service:
    """What the server answers with, and its limits."""

    chat: ChatModel
    decoder: DecodingThread
    name: str  # of the model
    input_tokens: int  # of a prompt, at most
    new_tokens: int  # of an answer, at most
    api_key: str = ""  # "": none is asked for
    single_turn: bool = False  # each question is answered by itself
    run_dir: Path | None = None  # whose curves the page shows
    hosts: tuple[str, ...] = ("*",)  # names under which the server may be called
    body_bytes: int = 4 * 2**20
    request_seconds: float = 300.0
    language: str = "en"
    metrics: ServerMetrics = field(default_factory=ServerMetrics)


def make_app(service):
    """The ASGI application."""
    routes = [
        Route("/", partial(page, service)),
        Route("/health", partial(health, service)),
        Route("/v1/models", guarded(service, models)),
        Route("/v1/chat/completions", guarded(service, partial(complete, parse_chat)), methods=["POST"]),
        Route("/v1/completions", guarded(service, partial(complete, parse_completion)), methods=["POST"]),
        Route("/metrics", guarded(service, metrics)),
        Route("/run.json", guarded(service, run_curves)),
    ]
    only_hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=list(service.hosts))]
    return Starlette(routes=routes, middleware=only_hosts, lifespan=partial(running, service))


@contextlib.asynccontextmanager
async def running(service, app):
    """Runs the decoder as long as the server runs."""
    service.decoder.start()
    try:
        yield
    finally:  # also where a second Ctrl+C cancels this
        service.decoder.stop()


def guarded(service, endpoint):
    """`endpoint` for those who know the API key, with a JSON error for what it refuses."""

    async def guard(request):
        status = 500
        try:
            check_key(service, request)
            response = await endpoint(service, request)
            status = response.status_code
            return response
        except Refused as error:
            status = error.status
            return JSONResponse(error_body(str(error), error.kind), status, error.headers)
        except ClientDisconnect:  # before its body was there
            status = 499
            return Response(status_code=status)
        finally:
            service.metrics.requests.labels(request.url.path, status).inc()

    return guard


def check_key(service, request):
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if service.api_key and not hmac.compare_digest(given.encode("latin-1"), service.api_key.encode()):
        raise Refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "authentication_error")


async def page(service, request):
    return HTMLResponse(page_text(service), headers=PAGE_HEADERS)


def page_text(service):
    texts = CATALOGUE[service.language].items()
    words = {key.removeprefix("page."): text for key, text in texts if key.startswith("page.")}
    values = dict(
        words=words, model=service.name, language=service.language, hasRun=service.run_dir is not None,
        needsKey=bool(service.api_key), maxNewTokens=service.new_tokens, singleTurn=service.single_turn,
    )  # fmt: skip
    return PAGE.read_text(encoding="utf-8").replace("{{SETTINGS}}", json.dumps(values).replace("<", "\\u003c"))


async def health(service, request):
    is_alive = service.decoder.is_alive()
    return JSONResponse(dict(status="ok" if is_alive else "the decoder has ended"), 200 if is_alive else 500)


async def models(service, request):
    return JSONResponse(dict(object="list", data=[dict(id=service.name, object="model", created=0, owned_by="you")]))


async def metrics(service, request):
    return Response(service.metrics.text(service.decoder.num_open), media_type="text/plain; version=0.0.4")


async def run_curves(service, request):
    if service.run_dir is None:
        raise Refused(404, "no run is shown: start the server with --run RUN_DIR")
    journal = service.run_dir / "metrics.jsonl"
    try:
        stat = journal.stat()
        return JSONResponse(await asyncio.to_thread(_curves, journal, stat.st_size, stat.st_mtime_ns))
    except (OSError, ValueError) as error:
        raise Refused(404, f"the run cannot be read: {error}") from None


@lru_cache(maxsize=1)
def _curves(journal, size, changed):  # the last two say whether the file is still the same
    return curves_of(journal)


async def complete(parse, service, request):
    """Answer a chat or completion request, whole or as server-sent events."""
    body = await read_json(request, service.body_bytes)
    deadline = asyncio.get_running_loop().time() + service.request_seconds
    try:
        asked = parse(body, service.chat, service.new_tokens)
        turns = alone(asked.turns) if service.single_turn else asked.turns
        ids = await until_disconnected(request, ids_of(service, turns, deadline))
    except ValueError as error:
        raise Refused(400, str(error)) from None
    try:
        stream = service.decoder.submit(Request(ids, asked.max_new_tokens, asked.sampling, streams=True))
    except TooBusy as error:
        raise Refused(429, str(error), "rate_limit_error", {"retry-after": "1"}) from None
    except RuntimeError as error:
        raise Refused(503, str(error), "server_error") from None
    service.metrics.prompt_tokens.inc(len(ids))
    reply = Reply.to(service.name, parse is parse_chat)
    answer = AnswerText(service, stream, asked.stops, len(ids), deadline)
    if asked.streams:
        return StreamingResponse(events(answer, reply, asked.wants_usage), media_type="text/event-stream")
    text = "".join(await until_disconnected(request, collect(answer)))
    return JSONResponse(reply.whole(text, answer.reason, answer.usage))


def alone(turns):
    """The last of `turns`, and those of the system."""
    return [*(turn for turn in turns[:-1] if turn[0] == "system"), turns[-1]]


async def ids_of(service, turns, deadline):
    """Ids of the prompt, read in a thread, so that the others need not wait for it. A `deadline` of the event loop."""
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(prompt_ids, service.chat, turns, service.input_tokens)
    except TimeoutError:
        raise Refused(503, f"the prompt was not read within {service.request_seconds:g} s", "server_error") from None


class AnswerText:
    """The text of one answer, piece by piece; `reason` and `usage` say afterwards how it ended and what it took."""

    def __init__(self, service, stream, stops, prompt_tokens, deadline):
        self.service, self.stream, self.stops, self.deadline = service, stream, stops, deadline
        self.prompt_tokens, self.new_tokens, self.reason = prompt_tokens, 0, "length"
        self.is_over = False  # the piece given now is the last one

    @property
    def usage(self):
        return usage_of(self.prompt_tokens, self.new_tokens)

    async def pieces(self):
        """Yield text that can be shown. Frees the slot when it ends, fails or is left."""
        metrics, started = self.service.metrics, time.monotonic()
        text, stop = TextStream(self.service.chat.tokenizer), StopFilter(self.stops)
        try:
            async with asyncio.timeout_at(self.deadline):
                async for progress in self.stream:
                    if not self.new_tokens:
                        metrics.first_token_seconds.observe(time.monotonic() - started)
                    self.new_tokens += len(progress.ids)
                    metrics.new_tokens.inc(len(progress.ids))
                    piece = stop.add(text.add(progress.ids), progress.is_finished)
                    self.is_over = stop.is_stopped or progress.is_finished
                    if stop.is_stopped or (progress.is_finished and self._ended_itself()):
                        self.reason = "stop"
                    yield piece
                    if self.is_over:
                        return
        except TimeoutError:
            pass  # what is there is the answer: its reason stays "length"
        finally:
            self.service.decoder.cancel(self.stream)
            metrics.request_seconds.observe(time.monotonic() - started)

    def _ended_itself(self):
        return self.new_tokens < self.stream.request.max_new_tokens


async def collect(answer):
    return [piece async for piece in answer.pieces()]


async def until_disconnected(request, work):
    """The result of the coroutine `work`, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=DISCONNECT_SECONDS)
            if not task.done() and await request.is_disconnected():
                task.cancel()
    except asyncio.CancelledError:  # the server ends, and this request with it
        task.cancel()
        raise Refused(503, "the server has ended", "server_error") from None
    try:
        return await task
    except asyncio.CancelledError:
        raise Refused(499, "the client has left") from None
    except RuntimeError as error:
        raise Refused(503, str(error), "server_error") from None


async def events(answer, reply, wants_usage):
    """Server-sent events of an answer: one part for each step, the first and the last words together with its text."""
    before, after = reply.frame()
    part = event(reply.piece("", is_first=True))
    try:
        async for piece in answer.pieces():
            part += f"data: {before}{json.dumps(piece, ensure_ascii=False)}{after}\n\n" if piece else ""
            if part and not answer.is_over:
                yield part
                part = ""
    except RuntimeError as error:
        yield part + event(error_body(str(error), "server_error"))
        return
    part += event(reply.piece("", answer.reason))
    part += event(reply.usage(answer.usage)) if wants_usage else ""
    yield part + "data: [DONE]\n\n"


def event(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
