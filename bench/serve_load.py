"""The server under load: N clients, each of which asks again as soon as it has an answer, for S seconds.

    python -m bench.serve_load [MODEL_DIR] [--model small] [--streams 64] [--seconds 60] [--new_tokens 128]

Starts scripts/serve.py in a process of its own, on MODEL_DIR or on random weights of `--model`, and streams sampled
answers of `--new_tokens` tokens. After `--warm_seconds`, which are not counted, it prints one JSON line: answers,
errors, tokens a second, milliseconds to the first token, resident memory of the server before and after.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from config import MODELS
from model.data.tokenizer import load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import export_model
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig

SERVE = Path(__file__).resolve().parents[1] / "scripts" / "serve.py"
VOCAB_SIZE = 8192
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 6000)))
START_SECONDS, ANSWER_SECONDS = 300, 120
SAMPLING = dict(temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.1)


@dataclass
class Counts:
    """What the clients saw; `since` is when counting began."""

    since: float = 0.0
    answers: int = 0
    errors: list = field(default_factory=list)
    first_seconds: list = field(default_factory=list)


def main():
    parser = argparse.ArgumentParser(description="The server under load.")
    parser.add_argument("model_dir", nargs="?", type=Path)
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm_seconds", type=float, default=10)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=0, help="of the server; 0: as it chooses")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model_dir or write_model(Path(folder, "served"), options.model)
        port = free_port()
        words = [directory, "--port", port, "--max_prompt_tokens", 256, "--max_new_tokens", options.new_tokens]
        words += ["--slots", options.slots]
        process = subprocess.Popen([sys.executable, SERVE, *map(str, words)], stdout=sys.stderr)
        try:
            wait_for(port, process)
            print(json.dumps(asyncio.run(measure(port, psutil.Process(process.pid), options))), flush=True)
        finally:
            process.terminate()
            process.wait(30)


def write_model(directory, name):
    """A Hugging Face directory with random weights and a tokenizer of VOCAB_SIZE tokens, nearly all of them text."""
    train_tokenizer([CHARACTERS] * 3, VOCAB_SIZE, directory)
    tokenizer = load_tokenizer(directory)
    config = T5ModelConfig(**MODELS[name], vocab_size=tokenizer.vocab_size)
    export_model(TextToTextModel(config).initialise(0), tokenizer, directory)
    return directory


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(port, process):
    """Return when the server listens; RuntimeError if it ends first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not listen within {START_SECONDS} s: see its messages above")


async def measure(port, server, options):
    """The figures of one load as a dict."""
    counts, end = Counts(), asyncio.Event()
    clients = [asyncio.create_task(ask_again(port, options, counts, end, seed)) for seed in range(options.streams)]
    await asyncio.sleep(options.warm_seconds)
    before, tokens_before = server.memory_info().rss, await tokens_given(port)
    both = (server, psutil.Process())  # the clients share the machine
    spent_before = [cpu_seconds(process) for process in both]
    counts.since, counts.answers, counts.first_seconds = time.monotonic(), 0, []
    await asyncio.sleep(options.seconds)
    seconds, after = time.monotonic() - counts.since, server.memory_info().rss
    spent, clients_spent = (cpu_seconds(process) - earlier for process, earlier in zip(both, spent_before, strict=True))
    tokens, answers = await tokens_given(port) - tokens_before, counts.answers
    end.set()
    await asyncio.gather(*clients)
    first = sorted(counts.first_seconds)
    return dict(
        streams=options.streams, seconds=round(seconds, 1), new_tokens=options.new_tokens, answers=answers,
        errors=len(counts.errors), first_errors=counts.errors[:3],
        tokens_per_second=round(tokens / seconds), first_token_p50_ms=percentile(first, 50),
        first_token_p95_ms=percentile(first, 95), first_token_most_ms=percentile(first, 100),
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
    started, first, is_done = time.monotonic(), None, False
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
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
        counts.first_seconds += [first - started] if first is not None else []


def percentile(sorted_seconds, percent):
    """Milliseconds below which so many percent lie; None without any."""
    if not sorted_seconds:
        return None
    return round(1000 * sorted_seconds[min(len(sorted_seconds) - 1, len(sorted_seconds) * percent // 100)], 1)


if __name__ == "__main__":
    main()
