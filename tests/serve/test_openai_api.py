"""What a client may ask, what is refused and why, and where an answer stops."""

import json
from types import SimpleNamespace

import pytest

from model.data.answer_parts import Said
from model.data.conversation import Turn
from model.generate.sampling import Sampling
from model.serve.openai_api import Reply, StopFilter, parse_chat
from model.serve.openai_messages import message_of

CHAT = SimpleNamespace(sampling=Sampling(no_repeat_ngram_size=8), max_new_tokens=64)
USER = [dict(role="user", content="hi")]


TOOL = dict(type="function", function=dict(name="f", parameters={}))


def said(**fields):
    return dict(messages=[dict(role="assistant", content="x") | fields, *USER])


def parse(**fields):
    return parse_chat(dict(messages=USER) | fields, CHAT, 100)


def test_a_request_without_settings_gets_those_of_the_model_and_a_seed_of_its_own():
    one, other = parse(), parse()
    assert one.sampling.temperature == 0 and one.sampling.no_repeat_ngram_size == 8 and one.max_new_tokens == 64
    assert one.sampling.seed != other.sampling.seed and not one.streams


def test_settings_of_the_request_are_used():
    asked = parse(temperature=0.5, top_k=20.0, seed=7, max_tokens=9, stop="x", stream=True, n=1, tools=[])
    assert (asked.sampling, asked.max_new_tokens) == (Sampling(0.5, 20, no_repeat_ngram_size=8, seed=7), 9)
    assert asked.stops == ("x",) and asked.streams
    assert parse(top_p=0.9).sampling.temperature == 1, "a filter asks for a draw"


def test_turns_are_read_in_all_their_forms():
    parts = [dict(type="text", text="a"), dict(type="text", text="b")]
    messages = [dict(role="developer", content="s"), dict(role="user", content="q"), dict(role="assistant", content="")]
    asked = parse(messages=[*messages, dict(role="user", content=parts)])
    assert asked.turns == tuple(Turn(*t) for t in (("system", "s"), ("user", "q"), ("assistant", ""), ("user", "ab")))


def test_thoughts_calls_and_results_are_turns_and_the_results_stand_in_the_order_of_their_calls():
    said = dict(role="assistant", content=None, reasoning_content="hm", tool_calls=[
        dict(id="a", type="function", function=dict(name="now", arguments="")),
        dict(id="b", type="function", function=dict(name="sum", arguments='{"x": "一"}')),
    ])  # fmt: skip
    results = [dict(role="tool", tool_call_id=one, content=f"of {one}") for one in "ba"]
    calls = '{"name": "now", "arguments": {}}', '{"name": "sum", "arguments": {"x": "一"}}'
    shown = [Turn("assistant", "", "hm", calls), Turn("tool", "of a"), Turn("tool", "of b")]
    assert parse(messages=[*USER, said, *results]).turns == (Turn("user", "hi"), *shown)
    again = [*USER, said, *results, *USER, said, *results[::-1], *USER]
    assert parse(messages=again).turns == (Turn("user", "hi"), *shown) * 2 + (Turn("user", "hi"),)
    whole = message_of(Said("hm", "", calls))
    assert parse(messages=[whole, *USER]).turns[0] == shown[0], "an answer can be sent back"
    assert whole["content"] is None and len({call["id"] for call in whole["tool_calls"]}) == 2
    assert message_of(Said(text="")) == dict(role="assistant", content="")


def test_tools_are_shown_and_calls_read_as_tool_choice_says():
    assert (parse().tools, parse().reads_calls) == ("", False)
    asked = parse(tools=[TOOL])
    assert (json.loads(asked.tools), asked.reads_calls, asked.one_call) == ([TOOL], True, False)
    assert parse(tools=[TOOL], parallel_tool_calls=False).one_call
    asked = parse(tools=[TOOL], tool_choice="none")
    assert (asked.tools, asked.reads_calls) == ("", False)
    asked = parse(tool_choice="auto")
    assert (asked.tools, asked.reads_calls) == ("", True), "a model may know its tools by heart"


def test_thinking_is_asked_for_in_any_of_its_forms():
    assert parse().thinking is parse(chat_template_kwargs={}).thinking is None
    assert parse(enable_thinking=True).thinking and parse(chat_template_kwargs=dict(enable_thinking=True)).thinking
    for fields in (dict(enable_thinking=False), dict(reasoning_effort="none")):
        assert parse(**fields).thinking is False


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(messages=[]), "messages must be"), (dict(messages="x"), "messages must be"),
        (dict(messages=[dict(role="function", content="x")]), "role must be"),
        (dict(messages=[dict(role=["user"], content="x")]), "role must be"),
        (dict(messages=[dict(role="user", content=[dict(type="image_url")])]), "content must be text"),
        (dict(messages=[dict(role="assistant", content="x")]), "the last message"),
        (dict(n=2), "n=2 is not supported"), (dict(logprobs=True), "logprobs=True"), (dict(tools=[{}]), r"tools\[0\]="),
        (dict(max_tokens=101), "max_tokens=101"), (dict(max_tokens="5"), "max_tokens='5'"),
        (dict(max_completion_tokens=True), "max_completion_tokens=True"),
        (dict(temperature="hot"), "temperature='hot'"),
        (dict(temperature=-1), "temperature=-1"), (dict(top_k=0.5), "top_k=0.5"), (dict(seed=2**70), "seed="),
        (dict(stop=[1]), "stop must be"), (dict(stop=["a"] * 17), "at most 16"), (dict(stop=[""]), "stop must be"),
        (dict(presence_penalty=0.5), "presence_penalty=0.5"), (dict(max_tokens=0), "max_tokens=0"),
        (dict(top_k=float("inf")), "top_k=inf"), (dict(seed=float("nan")), "seed=nan"),
        (dict(temperature=10**400), "temperature=1000"), (dict(stream="false"), "stream='false'"),
        (dict(n=True), "n=True is not"), (dict(stop=0), "stop must be"), (dict(stop=False), "stop must be"),
        (dict(stop=""), "stop must be"), (dict(stream=0), "stream=0"), (dict(stream="yes"), "stream='yes'"),
        (dict(max_tokens=True), "max_tokens=True"), (dict(max_completion_tokens=5, max_tokens="x"), "max_tokens='x'"),
        (dict(seed=True), "seed=True"), (dict(echo=0), "echo=0"), (dict(logprobs=0), "logprobs=0"),
        (dict(presence_penalty=False), "presence_penalty=False"), (dict(tools={}), "tools="),
        (dict(response_format=dict(type="json_object")), "response_format="), (dict(response_format="text"), "respons"),
        (dict(tool_choice="required"), "tool_choice="), (dict(tool_choice=dict(type="function")), "tool_choice="),
        (dict(function_call="auto"), "function_call="), (dict(functions=[{}]), "functions="),
        (dict(modalities=["text", "audio"]), "modalities="), (dict(audio=dict(voice="x")), "audio="),
        (dict(prediction=dict(type="content", content="x")), "prediction="), (dict(verbosity="low"), "verbosity="),
        (dict(reasoning_effort="high"), "reasoning_effort="), (dict(web_search_options={}), "web_search_options="),
        (dict(logit_bias={"5": 1}), "logit_bias="), (dict(top_logprobs=2), "top_logprobs="),
        (dict(best_of=2), "best_of"),
        (dict(suffix="x"), "suffix="), (dict(temprature=1), "'temprature' is no field"),
        (dict(stream_options=1), "stream_options=1"), (dict(stream_options=dict(include_usage=1)), "include_usage=1"),
        (dict(stream_options=dict(more=True)), "stream_options.more"), (dict(prompt="x"), "'prompt' is no field"),
        (dict(tools=[TOOL | dict(type="custom")]), r"tools\[0\]="), (dict(tools=[TOOL] * 129), "at most 128"),
        (dict(tools=[dict(type="function", function=dict(name="f", parameters=[1]))]), "parameters must be"),
        (dict(tools=[dict(type="function", function=dict(name="f", description="\ud83d"))]), "as JSON"),
        (dict(parallel_tool_calls=1), "parallel_tool_calls=1"), (dict(enable_thinking="yes"), "enable_thinking='yes'"),
        (dict(chat_template_kwargs=1), "chat_template_kwargs=1"),
        (dict(chat_template_kwargs=dict(x=1)), "chat_template_kwargs.x is not"),
        (dict(chat_template_kwargs=dict(enable_thinking=0)), "enable_thinking=0"),
        (dict(enable_thinking=True, reasoning_effort="none"), "both true and false"),
        (said(tool_calls=[{}]), r"messages\[0\].tool_calls\[0\] must be"), (said(tool_calls=1), "must be a list"),
        (said(tool_calls=[dict(function=dict(name="f", arguments="x"))]), "a JSON object"),
        (said(tool_calls=[dict(function=dict(name="f", arguments="[]"))]), "a JSON object"),
        (said(tool_calls=[dict(function=dict(arguments="{}"))]), "must have a name"),
        (said(tool_calls=[dict(id=1, function=dict(name="f"))]), "with id, type"),
        (said(reasoning_content=1), "reasoning_content must be text"), (said(content=None), "content must be text"),
        (said(function_call={"name": "f"}), r"messages\[0\].function_call is not"),
        (dict(messages=[dict(role="user", content="x", reasoning_content="y")]), "only an assistant's"),
        (dict(messages=[*USER, dict(role="tool", content="1", tool_call_id="z")]), "tool_call_id='z'"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_reason(fields, reason):
    with pytest.raises(ValueError, match=reason):
        parse(**fields)


def test_fields_that_leave_the_answer_as_it_is_pass():
    neutral = dict(
        model="m", user="u", metadata={}, store=True, service_tier="auto", parallel_tool_calls=True, n=1, tools=[],
        response_format=dict(type="text"), tool_choice="auto", function_call="none", modalities=["text"],
        logprobs=False, presence_penalty=0.0, stop=None, stream_options=dict(include_usage=True),
        reasoning_effort=None, audio=None, enable_thinking=None,
    )  # fmt: skip
    assert parse(seed=1, **neutral).wants_usage
    neutral = said(refusal=None, tool_calls=None, reasoning_content=None, annotations=[])
    assert parse(**neutral).turns[0] == Turn("assistant", "x")


@pytest.mark.parametrize("pieces", [["abcdef"], list("abcdef"), ["ab", "cd", "ef"], ["abc", "def"]])
def test_text_ends_before_a_stop_however_it_comes(pieces):
    stop = StopFilter(("xx", "de"))
    shown = "".join(stop.add(piece, piece is pieces[-1]) for piece in pieces if not stop.is_stopped)
    assert shown == "abc" and stop.is_stopped


def test_what_only_looks_like_a_stop_is_shown_in_the_end():
    stop = StopFilter(("end",))
    assert [stop.add("an e"), stop.add("n"), stop.add("emy e"), stop.add("n", is_last=True)] == [
        "an ",
        "",
        "enemy ",
        "en",
    ]
    assert not stop.is_stopped


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_frame_around_a_text_is_the_whole_piece(is_chat):
    reply, text = Reply.to('a"-"b', is_chat), '"-" \n\u2028 字'
    (thought, (before, after)), shown = reply.frames(), json.dumps(text, ensure_ascii=False)
    assert json.loads(before + shown + after) == reply.piece(text)
    assert not is_chat or json.loads(thought[0] + shown + thought[1]) == reply.piece(reasoning_content=text)
