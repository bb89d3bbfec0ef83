"""The HTTP server of trained models: OpenAI's interface, a page to talk to them, what their runs say.

The requests of all connections to a model are decoded together by its DecodingThread; this module runs on the event
loop and waits for it.
"""

import asyncio
import contextlib
import hmac
import json
from dataclasses import dataclass
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
from model.data.conversation import Turn
from model.display.catalogue import CATALOGUE
from model.generate.engine import Request
from model.serve.answer_stream import AnswerStream, as_text, collect, reader
from model.serve.answering import prompt_ids, question_start
from model.serve.completions import check_size, continue_all, ids_of_prompt
from model.serve.decoding_thread import TooBusy
from model.serve.document import document, headers
from model.serve.openai_api import Reply, error_body, message_choice, parse_chat
from model.serve.openai_completions import parse_completion
from model.serve.run_panel import RunPanel
from model.serve.service import Service

DISCONNECT_SECONDS = 0.5  # between two looks whether a client that waits for a whole answer is still there


@dataclass(frozen=True)
class Site:
    """What the server offers, and who may call it."""

    services: tuple[Service, ...]  # with one ServerMetrics
    api_key: str = ""  # "": none is asked for
    runs: RunPanel | None = None  # that the page shows
    hosts: tuple[str, ...] = ("*",)  # names under which the server may be called
    body_bytes: int = 4 * 2**20

    @property
    def metrics(self):
        return self.services[0].metrics

    def service(self, name):
        """The Service of the model `name`: the only one whatever is asked, else the first where none is named."""
        named = [service for service in self.services if service.name == name]
        if not named and name and len(self.services) > 1:
            names = ", ".join(service.name for service in self.services)
            raise Refused(404, f"model={name!r:.80}: the models here are {names}", "not_found_error")
        return (named or self.services)[0]


def make_app(site):
    """The ASGI application."""
    html = document([service.entry() for service in site.services], bool(site.api_key), site.runs is not None)
    page_headers = headers(html)
    routes = [
        Route("/", lambda request: HTMLResponse(html, headers=page_headers)),
        Route("/health", partial(health, site)),
        Route("/v1/models", guarded(site, models)),
        Route("/v1/chat/completions", guarded(site, answer_chat), methods=["POST"]),
        Route("/v1/completions", guarded(site, complete), methods=["POST"]),
        Route("/metrics", guarded(site, metrics)),
        Route("/run.json", guarded(site, look_at_run)),
    ]
    only_hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=list(site.hosts))]
    absent = dict.fromkeys((404, 405), not_served)
    return Starlette(routes=routes, middleware=only_hosts, exception_handlers=absent, lifespan=partial(running, site))


@contextlib.asynccontextmanager
async def running(site, app):
    """Runs the decoders as long as the server runs."""
    for service in site.services:
        service.decoder.start()
    try:
        yield
    finally:  # also where a second Ctrl+C cancels this
        for service in site.services:
            service.decoder.stop()


def guarded(site, endpoint):
    """`endpoint` for those who know the API key, with a JSON error for what it refuses."""

    async def guard(request):
        status = 500
        try:
            check_key(site, request)
            response = await endpoint(site, request)
            status = response.status_code
            return response
        except Refused as error:
            status = error.status
            return JSONResponse(error_body(str(error), error.kind), status, error.headers)
        except ClientDisconnect:  # before its body was there
            status = 499
            return Response(status_code=status)
        finally:
            site.metrics.requests.labels(request.url.path, status).inc()

    return guard


def check_key(site, request):
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if site.api_key and not hmac.compare_digest(given.encode("latin-1"), site.api_key.encode()):
        raise Refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "authentication_error")


async def not_served(request, error):
    """A JSON error for an address that is not served, or not by this method."""
    served = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
    words = f"{request.method} {request.url.path:.80} is not served: ask {served}"
    return JSONResponse(error_body(words, "not_found_error"), error.status_code, error.headers)


async def health(site, request):
    is_alive = all(service.decoder.is_alive() for service in site.services)
    return JSONResponse(dict(status="ok" if is_alive else "the decoder has ended"), 200 if is_alive else 500)


async def models(site, request):
    return JSONResponse(dict(object="list", data=[service.entry() for service in site.services]))


async def metrics(site, request):
    num_open = sum(service.decoder.num_open for service in site.services)
    return Response(site.metrics.text(num_open), media_type="text/plain; version=0.0.4")


async def look_at_run(site, request):
    if site.runs is None:
        raise Refused(404, "no run is shown: start the server with --run RUN_DIR")
    name, language = (request.query_params.get(field, "") for field in ("run", "language"))
    if language not in CATALOGUE:
        language = "en"
    try:
        return JSONResponse(await asyncio.to_thread(site.runs.look, name, language))
    except (OSError, ValueError) as error:
        raise Refused(404, f"the run cannot be read: {error}") from None


async def answer_chat(site, request):
    """Answer a chat request, whole or as server-sent events."""
    body = await read_json(request, site.body_bytes)
    service = site.service(body.get("model"))
    deadline = asyncio.get_running_loop().time() + service.request_seconds
    with refusing():
        asked = parse_chat(body, service.chat, service.new_tokens)
        ids = await ids_of(request, service, asked, deadline)
        answer = begin(service, asked, reader(service.chat, asked), ids, deadline)
    reply = Reply.to(service.name, is_chat=True)
    if asked.streams:
        return StreamingResponse(events(answer, reply, asked.wants_usage), media_type="text/event-stream")
    parts = join_parts(await until_disconnected(request, collect(answer)))
    return JSONResponse(reply.whole([message_choice(parts, answer.reason)], answer.usage))


async def complete(site, request):
    """Continue the prompts of a completion request, whole or, if it is one, as server-sent events."""
    body = await read_json(request, site.body_bytes)
    service = site.service(body.get("model"))
    deadline = asyncio.get_running_loop().time() + service.request_seconds
    reply = Reply.to(service.name, is_chat=False)
    with refusing():
        asked = parse_completion(body, service.chat, service.new_tokens)
        prompts = await ids_of_prompts(request, service, asked.prompts, deadline)
        check_size(asked, prompts)
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


async def ids_of(request, service, asked, deadline):
    """Ids of the prompt of a chat request, read by a `deadline` of the event loop."""
    turns = alone(asked.turns) if service.single_turn else asked.turns
    reading = partial(prompt_ids, service.chat, turns, service.input_tokens, asked.tools, asked.thinking)
    if service.chat.reads_at_once(turns, asked.tools, asked.thinking):
        return reading()
    return await in_thread(request, service, deadline, reading)


async def ids_of_prompts(request, service, prompts, deadline):
    """Ids of each prompt of a completion request, read by a `deadline` of the event loop."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if service.chat.is_short([Turn("user", text) for text in texts]):
        return [ids_of_prompt(service, prompt) for prompt in prompts]
    reading = partial(list, map(partial(ids_of_prompt, service), prompts))
    return await in_thread(request, service, deadline, reading)


async def in_thread(request, service, deadline, reading):
    """What `reading` gives, called in a thread, so that others need not wait for it, while the client is there.

    Threads of many requests share the interpreter with the event loop, and each waits for it several times.
    """

    async def called():
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(reading)

    try:
        return await until_disconnected(request, called())
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
