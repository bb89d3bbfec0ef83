"""A real Ollama, started for a test, that makes models of Modelfiles and shows which prompts it gives llama.cpp."""

import json
import os
import re
import subprocess
from ast import literal_eval
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

from tests.ranks import free_port

PROMPT = re.compile(r'msg="completion request".* prompt=("(?:[^"\\]|\\.)*")')  # a line of its log at the third level


@dataclass(frozen=True)
class Ollama:
    """A server of its own on this machine, and its log."""

    address: str
    log: Path

    def ask(self, path, **body):
        request = Request(f"http://{self.address}/api/{path}", json.dumps(body | dict(stream=False)).encode())
        return json.load(urlopen(request, timeout=120))

    def run(self, *words, folder=None, typed=""):
        """What its command line prints."""
        given = dict(env=os.environ | dict(OLLAMA_HOST=self.address), cwd=folder, input=typed, text=True, timeout=120)
        return subprocess.run(["ollama", *words], **given, check=True, capture_output=True).stdout

    def prompts(self):
        """Every prompt so far."""
        return [literal_eval(text) for text in PROMPT.findall(self.log.read_text(encoding="utf-8"))]


@contextmanager
def ollama_at(home):
    """An Ollama whose models lie in this folder; ends with the block."""
    address, log = f"127.0.0.1:{free_port()}", home / "ollama.log"
    places = dict(HOME=str(home), OLLAMA_MODELS=str(home / "models"), OLLAMA_HOST=address)
    environment = os.environ | places | dict(OLLAMA_DEBUG="2", OLLAMA_NUM_PARALLEL="1", OMP_NUM_THREADS="1")
    with log.open("w") as written:
        process = subprocess.Popen(["ollama", "serve"], env=environment, stdout=written, stderr=written)
        try:
            found = Ollama(address, log)
            await_server(f"http://{address}/api/version", log)
            yield found
        finally:
            process.terminate()
            process.wait(60)


def await_server(url, log):
    """Wait until this address of a server answers; raises AssertionError with the end of its log after 30 seconds."""
    for _ in range(300):
        try:
            return urlopen(url, timeout=10)
        except URLError:
            sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def gap_of(model, tokenizer, ids, answer, text):
    """By how many nats a model prefers the first token of `answer` that a text has not; 0 if it has all."""
    shown = [_text_of(tokenizer, answer[:n]) for n in range(len(answer) + 1)]
    if text == shown[-1]:
        return 0
    # where "我们" is a token, a text that begins with it has left an answer that begins with "我" before that
    places = [n for n, one in enumerate(shown[:-1]) if text.startswith(one)]
    return min(_gap_at(model, tokenizer, (ids, answer, text), place) for place in places)


def _gap_at(model, tokenizer, row, place):
    """By how many nats a model prefers the token at a place of an answer to those that the text may have there."""
    ids, answer, text = row
    with torch.no_grad():
        scores = model(torch.tensor([[*ids, *answer[:place]]])).logits[0, -1].log_softmax(-1)
    others = {n: _text_of(tokenizer, [*answer[:place], n]) for n in range(tokenizer.vocab_size) if n != answer[place]}
    others[tokenizer.eos_id] = text if text == _text_of(tokenizer, answer[:place]) else None
    likeliest = max(float(scores[n]) for n, one in others.items() if one is not None and text.startswith(one))
    return float(scores[answer[place]]) - likeliest


def _text_of(tokenizer, ids):
    """What Ollama shows of these ids: not what ends an answer, and no part of a character at its end."""
    kept = [number for number in ids if number != tokenizer.eos_id]
    return tokenizer.backend.decode(kept, skip_special_tokens=False).rstrip("\ufffd")
