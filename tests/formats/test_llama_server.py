"""llama-server reads the template of an exported GGUF by itself, as the guide starts it, and answers as we do."""

import json
import shutil
import subprocess
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest

from model.formats.conversions import to_gguf
from model.serve.answering import load_chat_model, prompt_ids
from tests.formats.test_gguf import TALKS
from tests.formats.test_ollama import DECODERS, tokenizer_with, write_answering
from tests.llama import NEW_TOKENS, answers_of
from tests.nn.decoder.test_network import VARIANTS
from tests.ollama import await_server
from tests.ranks import free_port

pytestmark = pytest.mark.skipif(not shutil.which("llama-server"), reason="llama-server is not installed")


@contextmanager
def llama_server(path, log):
    """Address of a llama-server with this GGUF file and a float32 cache; it ends with the block."""
    address = f"http://127.0.0.1:{free_port()}"
    command = ["llama-server", "-m", path, "--jinja", "--port", address.rpartition(":")[2], "--threads", "1"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    with open(log, "w") as written, subprocess.Popen(command, stdout=written, stderr=written) as process:
        try:
            await_server(f"{address}/health", log)  # 503, an error, while the model is read
            yield address
        finally:
            process.terminate()


def ask(address, text):
    """The greedy answer to a question, and the number of tokens that the server read."""
    body = dict(messages=[dict(role="user", content=text)], temperature=0, max_tokens=NEW_TOKENS)
    body["chat_template_kwargs"] = dict(enable_thinking=False)  # as we ask
    request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    found = json.load(urlopen(request, timeout=60))
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name, variant", DECODERS)
def test_llama_server_s_greedy_answers_are_ours(tmp_path, name, variant):
    tokenizer, home = tokenizer_with(tmp_path / "tokenizer", name), tmp_path / "answers"
    write_answering(home, tokenizer, **VARIANTS[variant])
    to_gguf(home, tmp_path / "gguf", "f32")
    (path,) = (tmp_path / "gguf").glob("*.gguf")
    chat = load_chat_model(home, "cpu")
    inputs = [prompt_ids(chat, [("user", text)], 128) for text in TALKS]
    wanted = [chat.tokenizer.backend.decode(ids) for ids in answers_of(chat, inputs)]  # no mark of a turn is shown
    with llama_server(path, tmp_path / "log.txt") as address:
        found = [ask(address, text) for text in TALKS]
    assert found == [*zip(wanted, map(len, inputs), strict=True)] and len({*wanted}) > 50
