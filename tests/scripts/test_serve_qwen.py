"""The server with a Qwen: long conversations, a key, and a system text that leaves no room."""

import json
import os
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from model.formats.weights import export_model
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.ranks import free_port
from tests.served import (
    ENDLESS,
    START_SECONDS,
    can_connect,
    client_of,
    messages,
    post,
    started,
    wait_until,
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(address, process) of a server that asks for the key k, with a random Qwen."""
    folder, port = tmp_path_factory.mktemp("qwen"), free_port()
    tokenizer = make_qwen_tokenizer(folder / "tokenizer")
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model = DecoderModel(DecoderModelConfig(**sizes, vocab_size=tokenizer.vocab_size)).initialise(0)
    export_model(model, tokenizer, folder / "best", dict(max_new_tokens=8, chat_trainer=dict(single_turn=True)))
    words = [str(folder / "best"), "--port", str(port), "--single_turn=False", "--api_key", "k"]
    words += ["--max_prompt_tokens", "2000", "--max_new_tokens", "4000"]
    process = started(words, stderr=open(folder / "stderr", "w"))
    wait_until(lambda: can_connect(port), START_SECONDS)
    yield f"http://127.0.0.1:{port}", process
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert "Traceback" not in (folder / "stderr").read_text()


def test_the_key_is_asked_for(qwen):
    assert post(qwen, b"{}") == post(qwen, b"{}", Authorization="Bearer wrong") == 401
    assert client_of(qwen, api_key="k").models.list().data[0].object == "model"


def test_ten_thousand_turns_are_answered_in_a_second_of_cpu_time_while_another_client_is_served(qwen):
    turns = [dict(role=("user", "assistant")[place % 2], content="天") for place in range(9_999)]
    body = json.dumps(dict(messages=turns, max_tokens=1)).encode()
    stream = client_of(qwen, api_key="k").chat.completions.create(
        model="", messages=messages("天"), stream=True, **ENDLESS
    )
    with ThreadPoolExecutor(1) as pool:
        asking, times = pool.submit(ask, qwen, body), [cpu_seconds(qwen)]
        while not asking.done():
            next(stream)
            times.append(cpu_seconds(qwen))
    stream.close()
    assert 1900 < asking.result()["usage"]["prompt_tokens"] <= 2000
    assert times[-1] - times[0] < 1, "the stream's own pieces included"
    assert max(after - before for before, after in pairwise(times)) < 0.5, "the stream stood still"


def cpu_seconds(server):
    """Seconds for which the server has computed: those of a clock also count what else the machine does."""
    times = Path("/proc", str(server[1].pid), "stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def ask(server, body):
    """JSON of the answer to a request that OpenAI's client would take seconds to write."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    return json.load(urllib.request.urlopen(urllib.request.Request(f"{server[0]}/v1/chat/completions", body, headers)))


def test_a_system_text_without_room_for_the_question_is_refused_and_the_server_goes_on(qwen):
    client = client_of(qwen, api_key="k")
    system = dict(role="system", content="天 " * 5000)
    with pytest.raises(openai.BadRequestError, match="system text and question have more than"):
        client.chat.completions.create(model="", messages=[system, *messages("天")])
    assert client.chat.completions.create(model="", messages=messages("天"), max_tokens=2).usage.completion_tokens


def test_a_client_that_leaves_in_mid_body_is_counted_without_a_traceback(qwen):
    for _ in range(3):
        with socket.create_connection(qwen[0].removeprefix("http://").split(":")) as sock:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer k\r\n"
            sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
            time.sleep(0.1)
    counted = 'chat_requests_total{path="/v1/chat/completions",status="499"}'
    wait_until(lambda: metric(qwen, counted) >= 3)
    assert metric(qwen, 'chat_requests_total{path="/v1/chat/completions",status="500"}') == 0


def metric(server, name):
    request = urllib.request.Request(server[0] + "/metrics", headers=dict(Authorization="Bearer k"))
    lines = urllib.request.urlopen(request).read().decode().split("\n")
    return float(next((line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")), 0))


def test_fields_that_change_the_answer_are_refused_as_openai_s_client_expects(qwen):
    client = client_of(qwen, api_key="k")
    choice = dict(tool_choice="required")
    for more in (dict(response_format=dict(type="json_object")), choice, dict(n=True), dict(stop=0)):
        with pytest.raises(openai.BadRequestError, match=next(iter(more))) as refused:
            client.chat.completions.create(model="", messages=messages("天"), **more)
        assert refused.value.body["type"] == "invalid_request_error"
