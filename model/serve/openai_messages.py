"""Messages and tools of OpenAI's HTTP interface as the turns of a conversation, and an answer as such a message."""

import json
import secrets
from itertools import groupby

from model.data.answer_parts import written_call
from model.data.conversation import TOOL, Turn

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": TOOL}
MAX_MESSAGES, MAX_TOOLS, MAX_NAME_CHARS = 10_000, 128, 200
NOT_READ = ("function_call", "audio")  # of a message: they would change what it says


def turns_of(messages):
    """The Turns of a request's messages, results of calls in the calls' order; ValueError for what cannot be read."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ValueError(f"messages must be a list of 1 to {MAX_MESSAGES:,} objects with role and content")
    turns, places, order = [], [], {}
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        turn = _turn(message, where)
        if turn.calls:
            order |= {
                call["id"]: len(order) + place for place, call in enumerate(message["tool_calls"]) if "id" in call
            }
        turns.append(turn)
        places.append(_place_of_result(message, order, where) if turn.role == TOOL else None)
    if turns[-1].role not in ("user", TOOL):
        raise ValueError("the last message must have the role user or tool")
    return tuple(_in_the_order_of_calls(turns, places))


def _turn(message, where):
    role = message.get("role") if isinstance(message, dict) else None
    role = ROLES.get(role) if isinstance(role, str) else None
    if role is None:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}")
    for name in NOT_READ:
        if message.get(name):
            raise ValueError(f"{where}.{name} is not supported: leave it out")
    thought = message.get("reasoning_content") or ""
    if not isinstance(thought, str):
        raise ValueError(f"{where}.reasoning_content must be text")
    calls = _calls(message.get("tool_calls") or [], f"{where}.tool_calls")
    if role != "assistant" and (thought or calls):
        raise ValueError(f"{where}: only an assistant's message has {'tool_calls' if calls else 'reasoning_content'}")
    content = message.get("content")
    return Turn(role, "" if calls and content is None else _text(content, where), thought, calls)


def _text(content, where):
    if isinstance(content, list):  # parts, of which only text can be read
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(texts) if len(texts) == len(content) and all(isinstance(t, str) for t in texts) else None
    if not isinstance(content, str):
        raise ValueError(f"{where}.content must be text")
    return content


def _calls(calls, where):
    """The JSON text of each call of an assistant's message."""
    if not isinstance(calls, list):
        raise ValueError(f"{where} must be a list")
    return tuple(_call(call, f"{where}[{place}]") for place, call in enumerate(calls))


def _call(call, where):
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(call.get("id", ""), str):
        raise ValueError(f"{where} must be an object with id, type (function) and function")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return written_call(dict(name=function.get("name"), arguments=arguments))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}.function must have a name, and arguments that are a JSON object: {error}") from None


def _place_of_result(message, order, where):
    """The place of the call whose result a message is, as its tool_call_id says; None without one."""
    call_id = message.get("tool_call_id")
    if call_id is not None and (not isinstance(call_id, str) or call_id not in order):
        raise ValueError(f"{where}.tool_call_id={call_id!r:.80}: no message before it has a call of this id")
    return order.get(call_id)


def _in_the_order_of_calls(turns, places):
    """The turns, the results that follow each other sorted by the places of their calls if all have one."""
    for role, run in groupby(zip(turns, places, strict=True), key=lambda pair: pair[0].role):
        run = list(run)
        if role == TOOL and all(place is not None for _, place in run):
            run.sort(key=lambda pair: pair[1])
        yield from (turn for turn, _ in run)


def tools_of(tools):
    """The JSON text of a request's tools, "" of none; ValueError if they are no list of functions."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ValueError(f"tools={tools!r:.80}: must be a list of at most {MAX_TOOLS} tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise ValueError(f"tools[{place}]={tool!r:.80}: must be of type function, with a function that has a name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ValueError(f"tools[{place}].function.parameters must be an object")
    try:
        text = json.dumps(tools, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:
        raise ValueError(f"tools cannot be written as JSON: {error}") from None
    return text if tools else ""


def message_of(parts, role="assistant"):
    """The message that says what a Said or a Turn holds; its content is null where it says nothing but calls."""
    message = dict(role=role, content=parts.text if parts.text or not parts.calls else None)
    if parts.thought:
        message |= dict(reasoning_content=parts.thought)
    return message | (dict(tool_calls=[call_of(text) for text in parts.calls]) if parts.calls else {})


def call_of(text):
    """A call in OpenAI's form, of the JSON text of {"name", "arguments"}, with an id of its own."""
    call = json.loads(text)
    function = dict(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False))
    return dict(id=f"call_{secrets.token_hex(12)}", type="function", function=function)
