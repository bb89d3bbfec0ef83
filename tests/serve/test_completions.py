"""/v1/completions: prompts as text and ids continued as they stand, with log-probabilities that are transformers'."""

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from model.data import template_frames
from model.data.conversation import Turn
from model.data.turn_template import turn_template
from model.formats.weights import export_model
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.serve import completions, scoring_queue
from model.serve.answering import load_chat_model, prompt_ids
from model.serve.decoding_thread import DecodingThread
from model.serve.server import Site, make_app
from model.serve.service import Service
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.knowing import PAIRS, write_knowing_model

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
INPUTS = [[5, 6, 7, 8, 30], [9], [11, 12, 13], [3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """The directory of a random Qwen with weights large enough that its answers differ."""
    folder = tmp_path_factory.mktemp("decoder")
    tokenizer = make_qwen_tokenizer(folder / "tokenizer")
    model = DecoderModel(DecoderModelConfig(**SIZES, vocab_size=tokenizer.vocab_size)).initialise(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)
    export_model(model, tokenizer, folder / "best", dict(max_new_tokens=8))
    return folder / "best"


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    write_knowing_model(folder)
    return folder


@contextlib.asynccontextmanager
async def served(directory):
    """The application of a server of the model in `directory`."""
    chat = load_chat_model(directory)
    decoder = DecodingThread(chat.model, chat.limits(4, 64, 16), max_waiting=20)
    decoder.start()
    try:
        yield make_app(Site((Service(chat, decoder, "m", 64, 16),)))
        assert decoder.num_open == 0
    finally:
        decoder.stop()


def ask(directory, *bodies):
    """The JSON answers to these bodies, posted together to a server of the model in `directory`."""

    async def ask_all():
        async with served(directory) as app:
            return [json.loads(text) for text in await asyncio.gather(*(post(app, body) for body in bodies))]

    return asyncio.run(ask_all())


async def post(app, body, path="/v1/completions"):
    """The bytes with which the application answers."""
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = dict(type="http", method="POST", path=path, query_string=b"", headers=headers)
    messages, sent = [dict(type="http.request", body=json.dumps(body).encode())], []

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


def log_probs(directory, ids):
    """transformers' log-probabilities (places, vocabulary) of the token after each of `ids`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_echoed_prompts_have_transformers_log_probabilities_and_the_likeliest_next_token(decoder):
    (answer,) = ask(decoder, dict(prompt=INPUTS, echo=True, logprobs=3, max_tokens=1, temperature=0, seed=1))
    tokenizer = load_chat_model(decoder).tokenizer
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for ids, choice in zip(INPUTS, answer["choices"], strict=True):
        expected, given = log_probs(decoder, ids), choice["logprobs"]
        ids = [*ids, int(expected[-1].argmax())]
        assert given["tokens"] == [tokenizer.backend.decode([i], skip_special_tokens=False) for i in ids]
        assert given["token_logprobs"][0] is given["top_logprobs"][0] is None
        wanted = [expected[place, token].item() for place, token in enumerate(ids[1:])]
        assert given["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
        assert [max(top.values()) for top in given["top_logprobs"][1:]] == pytest.approx(
            expected.amax(1).tolist(), abs=1e-4
        )
        assert given["token_logprobs"][-1] == max(given["top_logprobs"][-1].values()), "greedy, so lm_eval compares"
        assert given["text_offset"] == [len("".join(given["tokens"][:n])) for n in range(len(ids))]
        assert choice["finish_reason"] == ("stop" if ids[-1] == tokenizer.eos_id else "length")
    assert answer["usage"]["prompt_tokens"] == sum(map(len, INPUTS))


def test_generated_tokens_have_the_log_probabilities_that_an_echo_of_them_has(decoder):
    (made,) = ask(decoder, dict(prompt=INPUTS[0], logprobs=1, max_tokens=6, temperature=0))
    given, tokenizer = made["choices"][0]["logprobs"], load_chat_model(decoder).tokenizer
    expected, ids = log_probs(decoder, INPUTS[0]), list(INPUTS[0])
    for token, value in zip(given["tokens"], given["token_logprobs"], strict=True):
        ids.append(int(expected[-1].argmax()))
        assert tokenizer.backend.decode(ids[-1:], skip_special_tokens=False) == token
        assert value == pytest.approx(expected[-1].max().item(), abs=1e-4)
        expected = log_probs(decoder, ids)
    body = dict(prompt=ids, echo=True, logprobs=0, max_tokens=0)
    none, only, bare = ask(decoder, body, body | dict(prompt=[9]), dict(prompt=[9], echo=True, max_tokens=0))
    assert none["choices"][0]["logprobs"]["token_logprobs"][len(INPUTS[0]) :] == pytest.approx(
        given["token_logprobs"], abs=1e-5
    )
    assert none["usage"]["completion_tokens"] == 0
    assert only["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert bare["choices"][0]["logprobs"] is None and bare["choices"][0]["text"]


def test_a_decoder_goes_on_with_a_text_as_it_stands_and_reads_the_tokens_that_it_spells(decoder):
    tokenizer = load_chat_model(decoder).tokenizer
    text = "<|im_start|>user\n天气<|im_end|>"
    ids = tokenizer.parse(text)
    assert len(ids) < len(tokenizer.encode(text))
    body = dict(max_tokens=4, temperature=0, echo=True, logprobs=1)
    spelt, numbered, both = ask(
        decoder, body | dict(prompt=text), body | dict(prompt=ids), body | dict(prompt=[text, "天"])
    )
    assert spelt["choices"][0] == numbered["choices"][0] == both["choices"][0] and len(both["choices"]) == 2
    assert spelt["choices"][0]["text"].startswith(text)


def test_a_stop_ends_text_and_tokens_alike(t5):
    body = dict(prompt="hello", logprobs=0, max_tokens=16)
    whole, stopped = ask(t5, body, body | dict(stop=["are"]))
    assert stopped["choices"][0]["text"] == "how " and stopped["choices"][0]["finish_reason"] == "stop"
    tokens = stopped["choices"][0]["logprobs"]["tokens"]
    assert whole["choices"][0]["logprobs"]["tokens"][: len(tokens)] == tokens and "are" not in "".join(tokens)


def test_the_tokens_before_a_stop_are_found_with_few_looks(decoder):
    tokenizer, looks = load_chat_model(decoder).tokenizer, []
    ids = tokenizer.encode("今天天气很好。" * 60)

    class Counted:
        def decode(self, ids):
            looks.append(len(ids))
            return tokenizer.decode(ids)

    found = completions._ids_of_text(Counted(), ids, tokenizer.decode(ids)[:-3])
    assert tokenizer.decode(found) == tokenizer.decode(ids)[:-3] and len(looks) < 12


def test_a_t5_has_log_probabilities_of_its_answer_alone(t5):
    tokenizer = load_chat_model(t5).tokenizer
    ids = [*tokenizer.encode("请说一个字"), tokenizer.eos_id]
    body = dict(max_tokens=16, logprobs=1, temperature=0)
    of_ids, of_text, echoed = ask(
        t5, body | dict(prompt=ids), body | dict(prompt="请说一个字"), body | dict(prompt="hello", echo=True)
    )
    assert of_ids["choices"] == of_text["choices"]
    given = of_ids["choices"][0]["logprobs"]
    labels = torch.tensor([[*tokenizer.encode(PAIRS["请说一个字"]), tokenizer.eos_id]])
    assert len(given["tokens"]) == labels.numel(), "EOS has a place, too"
    model = AutoModelForSeq2SeqLM.from_pretrained(t5, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), labels=labels).logits[0].log_softmax(-1)
    assert given["token_logprobs"] == pytest.approx(expected.gather(1, labels[0, :, None])[:, 0].tolist(), abs=1e-4)
    assert "reads a prompt apart from its answer" in echoed["error"]["message"]


def test_texts_are_scored_in_smaller_passes_when_memory_runs_out(decoder, monkeypatch):
    sizes = []

    def score(model, first_id, requests):
        sizes.append(len(requests))
        if len(requests) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return score_tokens(model, first_id, requests)

    score_tokens = scoring_queue.score_tokens
    body = dict(prompt=INPUTS * 3, echo=True, logprobs=1, max_tokens=0)
    (calm,) = ask(decoder, body)
    monkeypatch.setattr(scoring_queue, "score_tokens", score)
    monkeypatch.setattr(scoring_queue, "TOKENS_AT_ONCE", dict(cpu=40))
    (answer,) = ask(decoder, body)
    assert len(sizes) > 2 and max(sizes) > 2
    for one, other in zip(calm["choices"], answer["choices"], strict=True):
        assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(other["logprobs"]["token_logprobs"][1:], abs=1e-5)


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(prompt=[]), "prompt must be"), (dict(prompt=""), "not empty"), (dict(prompt=[[]]), "not empty"),
        (dict(prompt=[5, True]), "list of token ids"), (dict(prompt=[["a"]]), "list of token ids"),
        (dict(prompt=["a"] * 129), "1 to 128"), (dict(prompt=[5, 100_000]), "this model's are 0 to"),
        (dict(prompt=[-1]), "this model's are 0 to"), (dict(prompt=[5] * 65), "at most 64 tokens"),
        (dict(prompt="天" * 2000), "2,000 characters"), (dict(logprobs=21), "logprobs=21"),
        (dict(logprobs=True), "logprobs=True"), (dict(echo=1), "echo=1"), (dict(max_tokens=0), "from 1 to 16"),
        (dict(stream=True, echo=True), "stream=true"), (dict(stream=True, prompt=["a", "b"]), "stream=true"),
        (dict(n=2), "n=2"), (dict(prompt=["a", "\ud83da"], echo=True), "half of a character, at place 0"),
        (dict(prompt=[[5] * 64] * 128, echo=True, logprobs=16, max_tokens=1), "at most 100,000 log-probabilities"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_with_the_reason(service_of_decoder, monkeypatch, fields, reason):
    monkeypatch.setattr(completions, "MAX_NAMED", 100_000)
    (answer,) = service_of_decoder(dict(prompt="a") | fields)
    assert reason in answer["error"]["message"]


@pytest.fixture(scope="module")
def service_of_decoder(decoder):
    return lambda body: ask(decoder, body)


def test_a_short_question_waits_for_no_thread_and_a_long_one_for_one(t5):
    """Threads share the interpreter with the event loop: of many questions at once each would wait for all."""
    (short, answer), free = next(iter(PAIRS.items())), threading.Event()

    def asked(text):
        return dict(messages=[dict(role="user", content=text)], max_tokens=16)

    async def ask_beside_a_busy_thread():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_in_executor(None, free.wait)
        async with served(t5) as app:
            try:
                long = asyncio.create_task(post(app, asked("好" * 3000), "/v1/chat/completions"))
                chat = asyncio.wait_for(post(app, asked(short), "/v1/chat/completions"), 30)
                completion = asyncio.wait_for(post(app, dict(prompt=short, stream=True, max_tokens=16)), 30)
                given = await asyncio.gather(chat, completion)
                assert not long.done()
            finally:
                free.set()
            return *given, await long

    chat, completion, long = asyncio.run(ask_beside_a_busy_thread())
    assert answer.startswith(json.loads(chat)["choices"][0]["message"]["content"]) and completion.endswith(
        b"[DONE]\n\n"
    )
    assert "shorten it" in json.loads(long)["error"]["message"]


def test_a_decoder_s_short_question_is_read_at_once_where_no_template_is_rendered_for_it(decoder, monkeypatch):
    turn_template.cache_clear()
    chat, rendered, render = load_chat_model(decoder), [], template_frames.render_all
    monkeypatch.setattr(template_frames, "render_all", lambda *args: rendered.append(args) or render(*args))
    talk = [Turn("system", "好"), Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")]
    for turns in (talk[1:2], talk[:2], talk):
        assert not chat.reads_at_once(turns)
        expected = prompt_ids(chat, turns, 64)
        rendered.clear()
        assert chat.reads_at_once(turns) and prompt_ids(chat, turns, 64) == expected and not rendered
    for turns in ([Turn("user", "a" * 2000)], [*talk, Turn("user", "<think>")], [*talk[:3], Turn("tool", "3")], []):
        assert not chat.reads_at_once(turns), turns
    assert not chat.reads_at_once(talk[:2], tools="[]")
