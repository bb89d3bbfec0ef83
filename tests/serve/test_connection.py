"""Connections whose clients send or read nothing end, and the others are served."""

import asyncio
import contextlib
import importlib
import sys
import time
from functools import partial

import pytest
import uvicorn

LOOK, ANSWER = 0.3, 1.2


@pytest.fixture(params=["httptools", "h11"])
def connection(request, monkeypatch):
    """model.serve.connection with or without httptools, and short times."""
    if request.param == "h11":
        monkeypatch.setitem(sys.modules, "httptools", None)
        for name in ("uvicorn.protocols.http.auto", "model.serve.connection"):
            monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("model.serve.connection")
    assert any(request.param in kind.__module__ for kind in module.WatchedConnection.__mro__)
    monkeypatch.setattr(module, "LOOK_SECONDS", LOOK)
    return module


async def app(scope, receive, send):
    """An answer of 20 parts within 0.8 s, or one without an end."""
    if scope["type"] == "lifespan":
        return
    await send(dict(type="http.response.start", status=200, headers=[]))
    for _ in range(20 if scope["path"] == "/" else 10**9):
        await asyncio.sleep(0.04 if scope["path"] == "/" else 0)
        await send(dict(type="http.response.body", body=b"x" * (9 if scope["path"] == "/" else 65536), more_body=True))
    await send(dict(type="http.response.body", body=b"end", more_body=False))


async def until_the_end(port, sent):
    """(seconds until the server ended the connection, what it answered)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    started, got = time.monotonic(), b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(999):
            got += part
    writer.close()
    return time.monotonic() - started, got


def served(connection, talk):
    """What `talk(port, server)` returns beside a running server."""

    async def both():
        made = partial(connection.WatchedConnection, answer_seconds=ANSWER)
        config = uvicorn.Config(app, port=0, http=made, timeout_keep_alive=60, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(talk(server.servers[0].sockets[0].getsockname()[1], server), 20)
        finally:
            server.should_exit = server.force_exit = True
            await running

    return asyncio.run(both())


def request(path):
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def test_a_client_that_asks_for_nothing_is_sent_away_and_one_that_asks_is_answered_whole(connection):
    async def talk(port, server):
        sent = (b"", b"GET / HTTP/1.1\r\nHost: local", request("/"))
        return await asyncio.gather(*(until_the_end(port, each) for each in sent))

    silent, half, whole = served(connection, talk)
    assert silent[0] < 3 * LOOK > half[0] and not silent[1] + half[1]
    assert b"end" in whole[1] and 0.8 < whole[0] < 0.8 + 4 * LOOK


def test_a_client_that_reads_nothing_is_sent_away(connection):
    async def talk(port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)  # it stops reading at once
        writer.write(request("/endless"))
        started = time.monotonic()
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        writer.close()
        return time.monotonic() - started

    assert ANSWER < served(connection, talk) < ANSWER + 5 * LOOK
