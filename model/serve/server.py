"""The HTTP server of trained models: OpenAI's interface, a page to talk to them, what their runs say.

The requests of all connections to a model are decoded together by its DecodingThread; this module runs on the event
loop and waits for it.
"""

import asyncio
import contextlib
import hmac
import json
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from model.commands.request_body import Refused, read_json
from model.data.answer_parts import join_parts
from model.display.catalogue import CATALOGUE
from model.generate.engine import Request
from model.serve.answer_stream import AnswerStream, as_text, collect, reader
from model.serve.answering import prompt_ids, question_start
from model.serve.decoding_thread import TooBusy
from model.serve.document import document, headers
from model.serve.openai_api import Reply, error_body, parse_chat, parse_completion
from model.serve.run_panel import RunPanel
from model.serve.served_model import ServedModel
from model.serve.server_metrics import ServerMetrics

DISCONNECT_SECONDS = 0.5  # between two looks whether a client that waits for a whole answer is still there


@dataclass(frozen=True)
class Service:
    """What the server answers with, and its limits."""

    models: tuple[ServedModel, ...]
    input_tokens: int  # of a prompt, at most
    new_tokens: int  # of an answer, at most
    api_key: str = ""  # "": none is asked for
    runs: RunPanel | None = None  # that the page shows
    hosts: tuple[str, ...] = ("*",)  # names under which the server may be called
    body_bytes: int = 4 * 2**20
    request_seconds: float = 300.0
    metrics: ServerMetrics = field(default_factory=ServerMetrics)

    @property
    def entries(self):
        """The models as /v1/models has them."""
        return [served.entry(self.input_tokens, self.new_tokens) for served in self.models]

    def model(self, name):
        """The model that a request names: the only one whatever it is called, else the first where none is named."""
        named = [served for served in self.models if served.name == name]
        if not named and name and len(self.models) > 1:
            names = ", ".join(served.name for served in self.models)
            raise Refused(404, f"model={name!r:.80}: the models here are {names}", "not_found_error")
        return (named or self.models)[0]


def make_app(service):
    """The ASGI application."""
    html = document(service.entries, bool(service.api_key), service.runs is not None)
    page_headers = headers(html)
    routes = [
        Route("/", lambda request: HTMLResponse(html, headers=page_headers)),
        Route("/health", partial(health, service)),
        Route("/v1/models", guarded(service, models)),
        Route("/v1/chat/completions", guarded(service, partial(complete, parse_chat)), methods=["POST"]),
        Route("/v1/completions", guarded(service, partial(complete, parse_completion)), methods=["POST"]),
        Route("/metrics", guarded(service, metrics)),
        Route("/run.json", guarded(service, look_at_run)),
    ]
    only_hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=list(service.hosts))]
    return Starlette(routes=routes, middleware=only_hosts, lifespan=partial(running, service))


@contextlib.asynccontextmanager
async def running(service, app):
    """Runs the decoders as long as the server runs."""
    for served in service.models:
        served.decoder.start()
    try:
        yield
    finally:  # also where a second Ctrl+C cancels this
        for served in service.models:
            served.decoder.stop()


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


async def health(service, request):
    is_alive = all(served.decoder.is_alive() for served in service.models)
    return JSONResponse(dict(status="ok" if is_alive else "a decoder has ended"), 200 if is_alive else 500)


async def models(service, request):
    return JSONResponse(dict(object="list", data=service.entries))


async def metrics(service, request):
    num_open = sum(served.decoder.num_open for served in service.models)
    return Response(service.metrics.text(num_open), media_type="text/plain; version=0.0.4")


async def look_at_run(service, request):
    if service.runs is None:
        raise Refused(404, "no run is shown: start the server with --run RUN_DIR")
    name, language = (request.query_params.get(field, "") for field in ("run", "language"))
    if language not in CATALOGUE:
        language = "en"
    try:
        return JSONResponse(await asyncio.to_thread(service.runs.look, name, language))
    except (OSError, ValueError) as error:
        raise Refused(404, f"the run cannot be read: {error}") from None


async def complete(parse, service, request):
    """Answer a chat or completion request, whole or as server-sent events."""
    body = await read_json(request, service.body_bytes)
    deadline = asyncio.get_running_loop().time() + service.request_seconds
    try:
        served = service.model(body.get("model"))
        asked = parse(body, served.chat, service.new_tokens)
        ids = await until_disconnected(request, ids_of(service, served, asked, deadline))
    except ValueError as error:
        raise Refused(400, str(error)) from None
    try:
        stream = served.decoder.submit(Request(ids, asked.max_new_tokens, asked.sampling, streams=True))
    except TooBusy as error:
        raise Refused(429, str(error), "rate_limit_error", {"retry-after": "1"}) from None
    except RuntimeError as error:
        raise Refused(503, str(error), "server_error") from None
    service.metrics.prompt_tokens.inc(len(ids))
    reply = Reply.to(served.name, parse is parse_chat)
    read = reader(served.chat, asked) if reply.is_chat else as_text
    answer = AnswerStream(served, service.metrics, stream, asked, read, len(ids), deadline)
    if asked.streams:
        return StreamingResponse(events(answer, reply, asked.wants_usage), media_type="text/event-stream")
    parts = join_parts(await until_disconnected(request, collect(answer)))
    return JSONResponse(reply.whole(parts, answer.reason, answer.usage))


def alone(turns):
    """The last question of `turns`, and those of the system before it."""
    start = question_start(turns)
    return [*(turn for turn in turns[:start] if turn.role == "system"), *turns[start:]]


async def ids_of(service, served, asked, deadline):
    """Ids of the prompt, read in a thread, so that the others need not wait for it. A `deadline` of the event loop."""
    turns = alone(asked.turns) if served.single_turn else asked.turns
    said = turns, service.input_tokens, asked.tools, asked.thinking
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(prompt_ids, served.chat, *said)
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
        raise Refused(503, str(error), "server_error") from None


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
