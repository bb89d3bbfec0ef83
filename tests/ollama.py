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
            _await(found)
            yield found
        finally:
            process.terminate()
            process.wait(60)


def _await(ollama):
    for _ in range(300):
        try:
            return urlopen(f"http://{ollama.address}/api/version", timeout=10)
        except URLError:
            sleep(0.1)
    raise AssertionError(ollama.log.read_text()[-2000:])
