"""A server as a real process, and what clients of it do."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "serve.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
START_SECONDS = 120
REPEATS = dict(repetition_penalty=0.01, no_repeat_ngram_size=0)  # favours a token that was there, so never EOS
ENDLESS = dict(max_tokens=4000, extra_body=REPEATS)


def started(words, **options):
    return subprocess.Popen([sys.executable, SCRIPT, *words], env=ENVIRONMENT, **options)


def can_connect(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition, seconds=120):
    """Wait for a condition; so long that a busy machine does not count as a failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def client_of(server, **options):
    return openai.OpenAI(base_url=server[0] + "/v1", max_retries=0, **dict(api_key="none") | options)


def messages(text):
    return [dict(role="user", content=text)]


def open_requests(server):
    text = urllib.request.urlopen(server[0] + "/metrics").read().decode()
    return float(text.split("\nchat_open_requests ")[1].split("\n")[0])


def post(server, body, **headers):
    request = urllib.request.Request(
        server[0] + "/v1/chat/completions", body, {"Content-Type": "application/json"} | headers
    )
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError):  # no answer
        return None


def write_journal(run_dir, num_lines):
    """The journal of a run with so many train lines of 8 pairs and an evaluation with a sample."""
    now = time.time() - 60
    samples = [dict(question="1+1?", answer=f"<b>{num_lines}</b>", reference="2")]
    lines = [
        dict(kind="start", time=now, total_steps=100, total_pairs=800, epoch_pairs=400, epochs=2, global_batch=8),
        dict(kind="resume", step=0, time=now),
    ]
    lines += [
        dict(kind="train", time=now + s, step=s, loss=9 - s / 10, learn_rate=1e-3, pairs_seen=8 * s, step_seconds=1,
             tokens_per_second=1000.0, reserved_bytes=3 * 2**30)
        for s in range(1, num_lines + 1)
    ]  # fmt: skip
    lines += [dict(kind="eval", time=now + num_lines, step=num_lines, loss=9.0, samples=samples)]
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
