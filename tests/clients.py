"""Clients of a server, each of which asks again as soon as it has an answer; what they measure."""

import asyncio
import json
import math
import random
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import psutil

CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 6000)))
ANSWER_SECONDS = 120
SAMPLING = dict(temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.1)


@dataclass
class Counts:
    """What the clients saw of questions asked from `since` on."""

    since: float = math.inf
    answers: int = 0
    errors: list = field(default_factory=list)
    asked: list = field(default_factory=list)  # when each answered question was
    begun_seconds: list = field(default_factory=list)  # until the answer's head came: its question waits for a slot
    first_seconds: list = field(default_factory=list)


async def measure(port, server, options):
    """The figures of one load as a dict."""
    counts, end = Counts(), asyncio.Event()
    clients = [asyncio.create_task(ask_again(port, options, counts, end, seed)) for seed in range(options.streams)]
    await asyncio.sleep(options.warm_seconds)
    before, tokens_before = server.memory_info().rss, await tokens_given(port)
    both = (server, psutil.Process())  # the clients share the machine
    spent_before = [cpu_seconds(process) for process in both]
    counts.since = time.monotonic()
    await asyncio.sleep(options.seconds)
    seconds, after = time.monotonic() - counts.since, server.memory_info().rss
    spent, clients_spent = (cpu_seconds(process) - earlier for process, earlier in zip(both, spent_before, strict=True))
    tokens, answers = await tokens_given(port) - tokens_before, counts.answers
    end.set()
    await asyncio.gather(*clients)
    begun, first = sorted(counts.begun_seconds), sorted(counts.first_seconds)
    return dict(
        streams=options.streams, seconds=round(seconds, 1), new_tokens=options.new_tokens, answers=answers,
        errors=len(counts.errors), first_errors=counts.errors[:3],
        tokens_per_second=round(tokens / seconds), first_token_p50_ms=percentile(first, 50),
        first_token_p95_ms=percentile(first, 95), first_token_most_ms=percentile(first, 100),
        read_p50_ms=percentile(begun, 50), read_p95_ms=percentile(begun, 95),
        asked_within_10_ms_p50=asked_together(sorted(counts.asked)),
        server_rss_mib_before=before >> 20, server_rss_mib_after=after >> 20,
        server_cores=round(spent / seconds, 2), clients_cores=round(clients_spent / seconds, 2),
        server_cpu_ms_per_1000_tokens=round(1e6 * spent / max(tokens, 1), 1),
    )  # fmt: skip


def cpu_seconds(process):
    times = process.cpu_times()
    return times.user + times.system


async def tokens_given(port):
    """Tokens of answers since the server began, by its /metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return float(text.split("\nchat_generated_tokens_total ")[1].split("\n")[0])


async def ask_again(port, options, counts, end, seed):
    """One client: asks until `end`, on a new connection each time."""
    draw = random.Random(seed)
    while not end.is_set():
        question = "".join(draw.choices(CHARACTERS, k=draw.randint(8, 64)))
        body = dict(SAMPLING, messages=[dict(role="user", content=question)], max_tokens=options.new_tokens,
                    seed=draw.randrange(2**31), stream=True)  # fmt: skip
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await ask(port, json.dumps(body).encode(), counts)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            counts.errors.append(repr(error)[:200])


async def ask(port, body, counts):
    """Stream one answer; ValueError if it is none or does not end with [DONE]."""
    started, begun, first, is_done = time.monotonic(), None, None, False
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status, begun = await reader.readline(), time.monotonic()
        if b" 200 " not in status:
            raise ValueError(f"{status!r} {await reader.read(2000)!r}")
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                    first = time.monotonic()
    finally:
        writer.close()
    if not is_done:
        raise ValueError("the stream ended without [DONE]")
    if started >= counts.since:
        counts.answers += 1
        counts.asked.append(started)
        counts.begun_seconds.append(begun - started)
        counts.first_seconds += [first - started] if first is not None else []


def percentile(sorted_seconds, percent):
    """Milliseconds below which so many percent lie; None without any."""
    if not sorted_seconds:
        return None
    return round(1000 * sorted_seconds[min(len(sorted_seconds) - 1, len(sorted_seconds) * percent // 100)], 1)


def asked_together(times):
    """How many questions, itself among them, come within 5 ms of one, in the median; None without any."""
    around = [bisect_right(times, at + 0.005) - bisect_left(times, at - 0.005) for at in times]
    return sorted(around)[len(around) // 2] if around else None
