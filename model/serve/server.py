"""The HTTP server of a trained model: OpenAI's interface, a page to talk to it, the curves of its run.

The requests of all connections are decoded together by one DecodingThread; this module runs on the event loop and
waits for it.
"""

import asyncio
import contextlib
import hmac
import json
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from model.commands.request_body import Refused, read_json
from model.data.answer_parts import join_parts
from model.display.catalogue import CATALOGUE
from model.display.curves import curves_of
from model.generate.engine import Request
from model.serve.answer_stream import AnswerStream, as_text, collect, reader
from model.serve.answering import ChatModel, prompt_ids, question_start
from model.serve.completions import continue_all, ids_of_prompt
from model.serve.decoding_thread import DecodingThread, TooBusy
from model.serve.openai_api import Reply, error_body, message_choice, parse_chat
from model.serve.openai_completions import parse_completion
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
        Route("/v1/chat/completions", guarded(service, answer_chat), methods=["POST"]),
        Route("/v1/completions", guarded(service, complete), methods=["POST"]),
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


async def answer_chat(service, request):
    """Answer a chat request, whole or as server-sent events."""
    body = await read_json(request, service.body_bytes)
    deadline = asyncio.get_running_loop().time() + service.request_seconds
    with refusing():
        asked = parse_chat(body, service.chat, service.new_tokens)
        ids = await until_disconnected(request, ids_of(service, asked, deadline))
        answer = begin(service, asked, reader(service.chat, asked), ids, deadline)
    reply = Reply.to(service.name, is_chat=True)
    if asked.streams:
        return StreamingResponse(events(answer, reply, asked.wants_usage), media_type="text/event-stream")
    parts = join_parts(await until_disconnected(request, collect(answer)))
    return JSONResponse(reply.whole([message_choice(parts, answer.reason)], answer.usage))


async def complete(service, request):
    """Continue the prompts of a completion request, whole or, if it is one, as server-sent events."""
    body = await read_json(request, service.body_bytes)
    deadline = asyncio.get_running_loop().time() + service.request_seconds
    reply = Reply.to(service.name, is_chat=False)
    with refusing():
        asked = parse_completion(body, service.chat, service.new_tokens)
        reading = in_thread(service, deadline, lambda: [ids_of_prompt(service, prompt) for prompt in asked.prompts])
        prompts = await until_disconnected(request, reading)
        if asked.asked.streams:
            answer = begin(service, asked.asked, as_text, prompts[0], deadline)
            return StreamingResponse(events(answer, reply, asked.asked.wants_usage), media_type="text/event-stream")
    service.metrics.prompt_tokens.inc(sum(map(len, prompts)))
    whole = reply.whole(*await until_disconnected(request, continue_all(service, asked, prompts, deadline)))
    return await asyncio.to_thread(JSONResponse, whole)  # log-probabilities of many tokens take a while to write


@contextlib.contextmanager
def refusing():
    """Context manager: what cannot be served, or not now, is Refused."""
    try:
        yield
    except ValueError as error:
        raise Refused(400, str(error)) from None
    except RuntimeError as error:
        raise not_now(error) from None


def not_now(error):
    """Refused, for a RuntimeError of the decoder."""
    if isinstance(error, TooBusy):
        return Refused(429, str(error), "rate_limit_error", {"retry-after": "1"})
    return Refused(503, str(error), "server_error")


def begin(service, asked, read, ids, deadline):
    """The AnswerStream of a prompt's ids. Raises TooBusy, and RuntimeError if the decoder has ended."""
    stream = service.decoder.submit(Request(ids, asked.max_new_tokens, asked.sampling, streams=True))
    service.metrics.prompt_tokens.inc(len(ids))
    return AnswerStream(service, stream, asked, read, len(ids), deadline)


def alone(turns):
    """The last question of `turns`, and those of the system before it."""
    start = question_start(turns)
    return [*(turn for turn in turns[:start] if turn.role == "system"), *turns[start:]]


async def ids_of(service, asked, deadline):
    """Ids of the prompt of a chat request, read by a `deadline` of the event loop."""
    turns = alone(asked.turns) if service.single_turn else asked.turns
    said = turns, service.input_tokens, asked.tools, asked.thinking
    return await in_thread(service, deadline, partial(prompt_ids, service.chat, *said))


async def in_thread(service, deadline, read):
    """What `read` gives, called in a thread, so that others need not wait for it."""
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(read)
    except TimeoutError:
        raise Refused(503, f"the prompt was not read within {service.request_seconds:g} s", "server_error") from None


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
        raise not_now(error) from None


async def events(answer, reply, wants_usage):
    """Server-sent events of an answer: one part for each step, the first and the last words together with its text."""
    (thought, text), numbers = reply.frames(), count()
    part = event(reply.piece(role="assistant"))
    try:
        async for new in answer.pieces():
            part += framed(thought, new.thought) + framed(text, new.text)
            part += "".join(event(reply.call(call, next(numbers))) for call in new.calls)
            if part and not answer.is_over:
                yield part
                part = ""
    except RuntimeError as error:
        yield part + event(error_body(str(error), "server_error"))
        return
    part += event(reply.piece(reason=answer.reason))
    part += event(reply.usage(answer.usage)) if wants_usage else ""
    yield part + "data: [DONE]\n\n"


def framed(frame, text):
    return f"data: {frame[0]}{json.dumps(text, ensure_ascii=False)}{frame[1]}\n\n" if text else ""


def event(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
