"""The server as a real process, with OpenAI's client, hostile clients and the panel of runs."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from types import SimpleNamespace

import openai
import psutil
import pytest

from scripts.serve import check, main, parse_arguments
from tests.browser import Page, needs_chromium, new_browser
from tests.clients import measure
from tests.knowing import CALLING, PAIRS, write_knowing_model
from tests.ranks import free_port
from tests.served import (
    ENDLESS,
    START_SECONDS,
    can_connect,
    client_of,
    messages,
    open_requests,
    post,
    started,
    wait_until,
    write_journal,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run directory with a model that knows PAIRS and CALLING."""
    folder = tmp_path_factory.mktemp("home") / "known"
    write_knowing_model(folder / "best", PAIRS | CALLING)
    single = dict(chat_trainer=dict(single_turn=True))  # it is so
    (folder / "best" / "generation_config.json").write_text(json.dumps(single))
    for name, num_lines in (("old", 1), ("new", 60)):
        write_journal(folder.parent / "runs" / name, num_lines)
    return folder


@pytest.fixture(scope="module")
def server(home, tmp_path_factory):
    """(address, process) of a server with 16 slots."""
    port = free_port()
    words = [
        str(home),
        "--run",
        str(home.parent / "runs"),
        "--port",
        str(port),
        "--max_new_tokens",
        "4000",
        "--max_waiting",
        "40",
    ]
    log = tmp_path_factory.mktemp("log") / "stderr"
    process = started([*words], stdout=subprocess.PIPE, stderr=open(log, "w"), text=True)
    line = process.stdout.readline()
    assert f"http://127.0.0.1:{port}" in line, line
    assert "trained on single questions: each is answered by itself" in process.stdout.readline()
    wait_until(lambda: can_connect(port), START_SECONDS)
    yield f"http://127.0.0.1:{port}", process
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
    assert "Traceback" not in log.read_text()


def test_openai_s_client_gets_answers_whole_and_streamed(server):
    client = client_of(server)
    assert [model.id for model in client.models.list()] == ["known"]
    for question, expected in PAIRS.items():
        whole = client.chat.completions.create(model="known", messages=messages(question))
        assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop"
        chunks = list(
            client.chat.completions.create(
                model="known", messages=messages(question), stream=True, stream_options=dict(include_usage=True)
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    completion = client.completions.create(model="known", prompt="hello", max_tokens=3, stop=["are"])
    assert completion.choices[0].text == "how "


def test_openai_s_client_gets_thought_and_calls_whole_and_streamed(server):
    client, asked = client_of(server), dict(model="known", messages=messages("想"), max_tokens=400)
    whole = client.chat.completions.create(tool_choice="auto", **asked).choices[0]
    assert (whole.message.content, whole.message.reasoning_content, whole.finish_reason) == ("好", "你", "tool_calls")
    (call,) = whole.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "f", {"x": "天"})
    with client.chat.completions.stream(tool_choice="auto", **asked) as stream:  # it puts the parts together itself
        assert "tool_calls.function.arguments.done" in [event.type for event in stream]
        again = stream.get_final_completion().choices[0]
    (call_again,) = again.message.tool_calls
    assert call_again.function.arguments == call.function.arguments and call_again.id.startswith("call_")
    assert (again.message.content, again.finish_reason) == ("好", "tool_calls")
    chunks = list(client.chat.completions.create(stream=True, stop="你", **asked))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "你", "no stop in a thought"
    text = "".join(delta.content or "" for delta in deltas)
    assert text == CALLING["想"].split("\n\n")[1] and chunks[-1].choices[0].finish_reason == "stop"
    raw = client.completions.create(model="known", prompt="想", max_tokens=400).choices[0].text
    assert raw == CALLING["想"]


def test_answers_are_cut_at_max_tokens_and_at_a_stop(server):
    client = client_of(server)
    cut = client.chat.completions.create(model="known", messages=messages("hello"), max_tokens=3).choices[0]
    assert cut.finish_reason == "length" and PAIRS["hello"].startswith(cut.message.content)
    stopped = client.chat.completions.create(model="known", messages=messages("hello"), stop="you").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("how are ", "stop")


def test_what_cannot_be_served_is_refused_as_openai_s_client_expects(server):
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        client.chat.completions.create(model="known", messages=messages("hello"), temperature=-1)
    with pytest.raises(openai.BadRequestError, match="1,000,000 characters"):
        client.chat.completions.create(model="known", messages=messages("字" * 1_000_000))
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not served: ask POST /v1/chat/completions"):
        client.embeddings.create(model="known", input="hello")


def test_sixteen_streams_at_once_are_answered_and_equal_seeds_give_equal_answers(server):
    async def talk():
        client = openai.AsyncOpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0)

        async def one(number):
            stream = await client.chat.completions.create(
                model="known", messages=messages("hello"), stream=True, temperature=2, seed=number // 2, max_tokens=24
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*(one(number) for number in range(16)))

    texts = asyncio.run(talk())
    assert texts[::2] == texts[1::2] and len(set(texts)) > 4


def test_sixteen_clients_that_ask_again_and_again_see_no_error(server):
    options = SimpleNamespace(streams=16, seconds=1, warm_seconds=0.5, new_tokens=16)
    found = asyncio.run(measure(server[0].rsplit(":", 1)[1], psutil.Process(server[1].pid), options))
    assert found["errors"] == 0 and found["answers"] > 0 and found["tokens_per_second"] > 0, found
    assert found["first_token_p50_ms"] <= found["first_token_p95_ms"] <= found["first_token_most_ms"]


def test_a_client_that_leaves_frees_its_slot(server):
    asked = dict(model="known", messages=messages("hello")) | ENDLESS
    stream = client_of(server).chat.completions.create(stream=True, **asked)
    next(iter(stream))
    assert open_requests(server) >= 1
    stream.close()
    wait_until(lambda: open_requests(server) == 0)
    with pytest.raises(openai.APITimeoutError):
        client_of(server, timeout=0.5).chat.completions.create(**asked)
    assert open_requests(server) == 1
    wait_until(lambda: open_requests(server) == 0)


def test_hostile_clients_leave_the_server_alive_and_its_memory_flat(server):
    process = psutil.Process(server[1].pid)
    client_of(server).chat.completions.create(model="known", messages=messages("hello"))
    before = process.memory_info().rss
    assert post(server, b"x" * 100_000_000) == 413, "it is told so, though it sends before it reads"
    assert post(server, b"[" * 100_000) == post(server, b"\xff") == post(server, b"[]") == 400
    assert post(server, b"{}", **{"Content-Type": "text/plain"}) == 415, "a form of another site could send it"
    assert post(server, b"{}", Host="evil.example") == 400, "a name of another site could point here"
    sockets = [socket.create_connection(server[0].removeprefix("http://").split(":")) for _ in range(1000)]
    for sock in sockets[:500]:
        sock.send(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9\r\n")
    for sock in sockets:
        sock.close()
    wait_until(lambda: post(server, json.dumps(dict(messages=messages("hello"))).encode()) == 200)
    assert process.memory_info().rss - before < 80 * 2**20


def test_more_requests_than_can_wait_are_told_to_come_again(server):
    async def ask():
        client = openai.AsyncOpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0)
        streams = [
            client.chat.completions.create(model="known", messages=messages("hello"), stream=True, **ENDLESS)
            for _ in range(70)
        ]
        got = await asyncio.gather(*streams, return_exceptions=True)
        refused = [one for one in got if isinstance(one, openai.RateLimitError)]
        assert len(refused) == 70 - 16 - 40 and refused[0].response.headers["retry-after"] == "1"
        for stream in got:
            if not isinstance(stream, Exception):
                await stream.close()

    asyncio.run(ask())
    wait_until(lambda: open_requests(server) == 0)


def test_a_model_of_single_questions_answers_the_second_as_the_first(server):
    said, client = [dict(role="system", content="")], client_of(server)
    for question, expected in PAIRS.items():
        said += messages(question)
        answer = client.chat.completions.create(model="known", messages=said).choices[0].message.content
        assert answer == expected
        said += [dict(role="assistant", content=answer)]


def test_another_address_needs_a_key(server, home, capsys):
    taken, elsewhere = server[0].rsplit(":", 1)[1], ["--host", "192.0.2.1", "--api_key", "k"]
    for words, said in (
        (["--host", "0.0.0.0"], r".*--api_key KEY.*"),
        (["--port", taken], rf"--port={taken} is in use: type another, or --port=0 .*"),
        (elsewhere, "--host=192.0.2.1: no address of this machine.*"),
    ):
        assert main(["nowhere", *words]) == 2, "refused before the model is loaded"
        assert re.fullmatch(said + "\n", capsys.readouterr().err)
    for words in (["--port", "70000"], ["--slots", "-1"], ["--run", "nowhere"]):
        with pytest.raises(ValueError, match=words[0]):
            check(parse_arguments([str(home), *words]))


@needs_chromium
def test_the_panel_says_where_each_run_of_a_folder_stands(server):
    browser = new_browser()
    try:
        look_at_runs(Page(browser, server[0]))
    finally:
        browser.quit()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server[0] + "/run.json?run=../known")


def look_at_runs(page):
    page.expect("#runs option", ["new", "old"])  # that with the newest line first
    page.choose("#runs", "new")
    wait_until(lambda: page.find("body").get_attribute("data-points") == "60")
    assert "60/100" in page.texts("#state")[0]
    rows = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
    assert rows["training loss"].startswith("3.0000") and rows["over-fit gap"].startswith("+3")
    assert rows["time left"] and "1,000 tokens/s" in rows["speed"]
    assert page.texts("#devices td") == ["0", "3.0", "3.0"], "the rank, its memory and the peak"
    assert page.texts(".sample p") == ["1+1?", "<b>60</b>", "Reference: 2"]
    log = page.texts("#log pre")[0].splitlines()
    assert len(log) == 50 and "step:60, loss:3.0000" in log[-2] and "val_loss:9.0000" in log[-1]
    drawn = "const c = arguments[0]; return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
    assert page.run(drawn, page.find("#loss")) and page.run(drawn, page.find("#speed"))
    assert not page.errors()
