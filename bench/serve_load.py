"""The server under load: N clients, each of which asks again as soon as it has an answer, for S seconds.

    python -m bench.serve_load [MODEL_DIR] [--model small] [--streams 64] [--seconds 60] [--new_tokens 128]

Starts scripts/serve.py in a process of its own, on MODEL_DIR or on random weights of `--model`, and streams sampled
answers of `--new_tokens` tokens. After `--warm_seconds`, which are not counted, it prints one JSON line: answers,
errors, tokens a second, milliseconds to the first token and, of these, until the question is read and waits for a slot,
how many questions come within 10 ms, in the median, resident memory of the server before and after.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from config import MODELS
from model.data.tokenizer import load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import export_model
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from tests.clients import CHARACTERS, measure
from tests.ranks import free_port

SERVE = Path(__file__).resolve().parents[1] / "scripts" / "serve.py"
VOCAB_SIZE = 8192
START_SECONDS = 300


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


def wait_for(port, process):
    """Return when the server listens; RuntimeError if it ends first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not listen within {START_SECONDS} s: see its messages above")


if __name__ == "__main__":
    main()
