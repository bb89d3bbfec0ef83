"""The requests and answers of OpenAI's HTTP interface, as far as a small chat model can serve them."""

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from model.data.answer_parts import overlap
from model.data.conversation import Turn
from model.generate.sampling import Sampling
from model.serve.openai_messages import call_of, message_of, tools_of, turns_of

SAMPLING_FIELDS = {f.name: f.type for f in fields(Sampling)}
MAX_STOPS, MAX_STOP_CHARS = 16, 200  # OpenAI takes 4; tasks of lm-evaluation-harness have more
# Fields that would change the answer and are not supported: accepted only with these values, which change nothing.
ONLY = dict(
    n=(1,), best_of=(1,), echo=(False,), logprobs=(False,), top_logprobs=(0,), presence_penalty=(0,),
    frequency_penalty=(0,), logit_bias=({},), functions=([],), suffix=("",), prediction=(), audio=(),
    response_format=({"type": "text"},), tool_choice=("none", "auto"), function_call=("none",), modalities=(["text"],),
    reasoning_effort=("none",), verbosity=("medium",), web_search_options=(),
)  # fmt: skip
CHAT_ONLY = {"tools", "parallel_tool_calls", "enable_thinking", "chat_template_kwargs"}
READ = {*SAMPLING_FIELDS, "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"}
WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip


@dataclass(frozen=True)
class ApiRequest:
    """What a client asks for."""

    turns: tuple[Turn, ...]
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    streams: bool
    wants_usage: bool  # at the end of a stream
    tools: str = ""  # that are shown to the model: JSON text of their list
    reads_calls: bool = False  # of the answer; else they stay text
    one_call: bool = False  # it ends with its first call
    thinking: bool | None = None  # before the answer; None: as the model's template has it


def parse_chat(body, chat, most_new_tokens):
    """ApiRequest of the JSON body of /v1/chat/completions; ValueError with the reason if it cannot be served."""
    turns = turns_of(body.get("messages"))
    given = given_fields(body, "messages", CHAT_ONLY)
    tools, parallel = tools_of(given.get("tools", [])), flag_of("parallel_tool_calls", given, True)
    reads_calls = given.get("tool_choice", "auto" if tools else "none") == "auto"
    return replace(
        request_of(turns, given, chat, most_new_tokens), tools=tools if reads_calls else "", reads_calls=reads_calls,
        one_call=not parallel, thinking=_thinking(given),
    )  # fmt: skip


def given_fields(body, name_of_turns, more=frozenset()):
    """The fields of a body but its turns, all of which are read here, or `more`, or have no effect."""
    given = {name: value for name, value in body.items() if value is not None and name != name_of_turns}
    for name, value in given.items():
        if name not in more:
            _check_known(name, value)
    return given


def request_of(turns, given, chat, most_new_tokens, least=1):
    """ApiRequest of these turns and the other fields of a body, with `least` new tokens at least."""
    asked = min(chat.max_new_tokens, most_new_tokens)
    for name in ("max_tokens", "max_completion_tokens"):  # the second is the newer
        asked = given.get(name, asked)
        if type(asked) is not int or not least <= asked <= most_new_tokens:
            raise ValueError(f"{name}={asked!r:.80}: must be a whole number from {least} to {most_new_tokens}")
    streams = flag_of("stream", given)
    return ApiRequest(
        turns, _sampling(given, chat.sampling), asked, _stops(given.get("stop", [])), streams, _wants_usage(given)
    )


def _thinking(given):
    """What a request says of thinking, in whichever way; None if nothing. Raises ValueError if it says both."""
    inside = given.get("chat_template_kwargs", {})
    if not isinstance(inside, dict):
        raise ValueError(f"chat_template_kwargs={inside!r:.80}: must be an object with enable_thinking")
    if unknown := inside.keys() - {"enable_thinking"}:
        raise ValueError(f"chat_template_kwargs.{min(unknown):.80} is not supported: leave it out")
    said = {flag_of("enable_thinking", one) for one in (given, inside) if one.get("enable_thinking") is not None}
    said |= {False} if "reasoning_effort" in given else set()  # none, which is the one that is taken
    if len(said) > 1:
        raise ValueError("enable_thinking is both true and false, the latter by reasoning_effort=none too: leave one")
    return said.pop() if said else None


def _check_known(name, value):
    """Raise ValueError for a field that is not known, and for a value that would change the answer and is not read."""
    if name in ONLY:
        # True equals 1 in Python, not in JSON
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in ONLY[name]):
            raise ValueError(f"{name}={value!r:.80} is not supported: leave it out")
    elif name not in READ | WITHOUT_EFFECT:
        raise ValueError(f"{name!r:.80} is no field that is read here: leave it out")


def _stops(stops):
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops):
        raise ValueError(f"stop must be a text or a list of texts of 1 to {MAX_STOP_CHARS} characters")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} texts: at most {MAX_STOPS}")
    return tuple(stops)


def _wants_usage(given):
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ValueError(f"stream_options={options!r:.80}: must be an object with include_usage")
    options = {name: value for name, value in options.items() if value is not None}
    if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
        raise ValueError(f"stream_options.{min(unknown):.80} is not supported: leave it out")
    flag_of("include_obfuscation", options)  # padding against those who watch the sizes of packets; none is sent
    return flag_of("include_usage", options)


def flag_of(name, given, default=False):
    """The bool `name` of a body's fields; ValueError for anything else."""
    if type(value := given.get(name, default)) is not bool:
        raise ValueError(f"{name}={value!r:.80}: must be true or false")
    return value


def _sampling(body, default):
    """The model's own settings, changed by the fields of the request; without a seed the draw is a new one."""
    given = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    numbers = {name: _number(name, value) for name, value in given.items()}
    if numbers.keys() & {"top_k", "top_p", "min_p"} and not (numbers.get("temperature", default.temperature)):
        numbers.setdefault("temperature", 1.0)  # as OpenAI's default: filters have no meaning without a draw
    return replace(default, **dict(seed=secrets.randbits(62)) | numbers)


def _number(name, value):
    """`value` in the type of a field of Sampling; ValueError if it is not such a number."""
    with suppress(ValueError, OverflowError):  # of a number that is not finite, or larger than any float
        number = SAMPLING_FIELDS[name](value) if isinstance(value, int | float) else None
        if number == value and not isinstance(value, bool):
            return number
    kind = "whole number" if SAMPLING_FIELDS[name] is int else "number"
    raise ValueError(f"{name}={value!r:.80}: must be a {kind}")


class StopFilter:
    """Text up to the first of `stops`; what may begin a stop is held back until it is clear that it does not."""

    def __init__(self, stops):
        self.stops, self.held, self.is_stopped = stops, "", False

    def add(self, text, is_last=False):
        """The text that can be shown after `text`."""
        held = self.held + text
        places = [place for stop in self.stops if (place := held.find(stop)) >= 0]
        if places:
            self.is_stopped, self.held = True, ""
            return held[: min(places)]
        keep = 0 if is_last else max((overlap(held, stop) for stop in self.stops), default=0)
        self.held = held[len(held) - keep :]
        return held[: len(held) - keep]


@dataclass(frozen=True)
class Reply:
    """Builds the objects that answer one request."""

    model: str
    is_chat: bool
    id: str
    created: int

    @staticmethod
    def to(model, is_chat):
        return Reply(model, is_chat, ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12), int(time.time()))

    def whole(self, choices, usage):
        return self._object("", choices, usage=usage)

    def piece(self, text="", reason=None, **delta):
        """A part of a stream with this text; `delta` is what else a chat's says."""
        delta |= dict(content=text) if text or "role" in delta else {}
        part = dict(delta=delta) if self.is_chat else dict(text=text)
        return self._object(".chunk", [dict(index=0, **part, logprobs=None, finish_reason=reason)])

    def call(self, text, number):
        """A part of a stream with a whole call, the answer's `number`-th."""
        return self.piece(tool_calls=[dict(index=number, **call_of(text))])

    def frames(self):
        """JSON before and after a thought, and a text, of a piece, so that a stream has only these to encode."""
        pieces = self.piece(reasoning_content="-"), self.piece("-")
        return [json.dumps(piece, ensure_ascii=False).rpartition('"-"')[::2] for piece in pieces]

    def usage(self, usage):
        return self._object(".chunk", [], usage=usage)

    def _object(self, suffix, choices, **more):
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return dict(id=self.id, object=kind, created=self.created, model=self.model, choices=choices) | more


def message_choice(parts, reason):
    """The one choice of a whole chat answer, of a Said and why it ended."""
    return dict(index=0, message=message_of(parts), logprobs=None, finish_reason=reason)


def usage_of(prompt_tokens, new_tokens):
    return dict(prompt_tokens=prompt_tokens, completion_tokens=new_tokens, total_tokens=prompt_tokens + new_tokens)


def error_body(message, kind="invalid_request_error"):
    return dict(error=dict(message=message, type=kind, param=None, code=None))
