"""The requests and answers of OpenAI's HTTP interface, as far as a small chat model can serve them."""

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from model.generate.sampling import Sampling

SAMPLING_FIELDS = {f.name: f.type for f in fields(Sampling)}
MAX_MESSAGES, MAX_STOPS, MAX_STOP_CHARS = 10_000, 4, 200
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that would change the answer and are not supported: accepted only with these values, which change nothing.
ONLY = dict(
    n=(1,), best_of=(1,), echo=(False,), logprobs=(False,), top_logprobs=(0,), presence_penalty=(0,),
    frequency_penalty=(0,), logit_bias=({},), tools=([],), functions=([],), suffix=("",), prediction=(), audio=(),
    response_format=({"type": "text"},), tool_choice=("none", "auto"), function_call=("none",), modalities=(["text"],),
    reasoning_effort=("none",), verbosity=("medium",), web_search_options=(),
)  # fmt: skip
READ = {*SAMPLING_FIELDS, "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"}
WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
}  # fmt: skip
NOT_IN_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "audio")


@dataclass(frozen=True)
class ApiRequest:
    """What a client asks for."""

    turns: tuple  # of (role, text)
    sampling: Sampling
    max_new_tokens: int
    stops: tuple[str, ...]
    streams: bool
    wants_usage: bool  # at the end of a stream


def parse_chat(body, chat, most_new_tokens):
    """ApiRequest of the JSON body of /v1/chat/completions; ValueError with the reason if it cannot be served."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ValueError(f"messages must be a list of 1 to {MAX_MESSAGES:,} objects with role and content")
    turns = tuple(_turn(message, place) for place, message in enumerate(messages))
    if turns[-1][0] != "user":
        raise ValueError("the last message must have the role user")
    return _request(turns, "messages", body, chat, most_new_tokens)


def parse_completion(body, chat, most_new_tokens):
    """ApiRequest of the JSON body of /v1/completions; ValueError with the reason if it cannot be served."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be a text that is not empty")
    return _request((("user", prompt),), "prompt", body, chat, most_new_tokens)


def _turn(message, place):
    role = message.get("role") if isinstance(message, dict) else None
    role = ROLES.get(role) if isinstance(role, str) else None
    if role is None:
        raise ValueError(f"messages[{place}].role must be one of {', '.join(ROLES)}")
    for name in NOT_IN_MESSAGES:
        if message.get(name):
            raise ValueError(f"messages[{place}].{name} is not supported: leave it out")
    content = message.get("content")
    if isinstance(content, list):  # parts, of which only text can be read
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(texts) if len(texts) == len(content) and all(isinstance(t, str) for t in texts) else None
    if not isinstance(content, str):
        raise ValueError(f"messages[{place}].content must be text")
    return role, content


def _request(turns, name_of_turns, body, chat, most_new_tokens):
    given = {name: value for name, value in body.items() if value is not None and name != name_of_turns}
    for name, value in given.items():
        _check_known(name, value)
    asked = min(chat.max_new_tokens, most_new_tokens)
    for name in ("max_tokens", "max_completion_tokens"):  # the second is the newer
        asked = given.get(name, asked)
        if type(asked) is not int or not 0 < asked <= most_new_tokens:
            raise ValueError(f"{name}={asked!r:.80}: must be a whole number from 1 to {most_new_tokens}")
    streams = _flag("stream", given)
    return ApiRequest(
        turns, _sampling(given, chat.sampling), asked, _stops(given.get("stop", [])), streams, _wants_usage(given)
    )


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
    _flag("include_obfuscation", options)  # padding against those who watch the sizes of packets; none is sent
    return _flag("include_usage", options)


def _flag(name, given):
    if type(value := given.get(name, False)) is not bool:
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
        keep = 0 if is_last else max((_overlap(held, stop) for stop in self.stops), default=0)
        self.held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text, stop):
    """Length of the longest end of `text` with which `stop` begins."""
    return next(size for size in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:size]))


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

    def whole(self, text, reason, usage):
        part = dict(message=dict(role="assistant", content=text)) if self.is_chat else dict(text=text)
        return self._object("", [dict(index=0, **part, logprobs=None, finish_reason=reason)], usage=usage)

    def piece(self, text, reason=None, is_first=False):
        delta = (dict(role="assistant") if is_first else {}) | (dict(content=text) if text or is_first else {})
        part = dict(delta=delta) if self.is_chat else dict(text=text)
        return self._object(".chunk", [dict(index=0, **part, logprobs=None, finish_reason=reason)])

    def frame(self):
        """JSON before and after the text of a piece, so that a stream has only its texts to encode."""
        before, _, after = json.dumps(self.piece("-"), ensure_ascii=False).rpartition('"-"')
        return before, after

    def usage(self, usage):
        return self._object(".chunk", [], usage=usage)

    def _object(self, suffix, choices, **more):
        kind = f"chat.completion{suffix}" if self.is_chat else "text_completion"
        return dict(id=self.id, object=kind, created=self.created, model=self.model, choices=choices) | more


def usage_of(prompt_tokens, new_tokens):
    return dict(prompt_tokens=prompt_tokens, completion_tokens=new_tokens, total_tokens=prompt_tokens + new_tokens)


def error_body(message, kind="invalid_request_error"):
    return dict(error=dict(message=message, type=kind, param=None, code=None))
