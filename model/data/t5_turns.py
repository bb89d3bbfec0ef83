"""How a T5 reads thoughts, calls and tools: as text, in turns of the system, the user and the assistant.

docs/conversations.md describes it. The marks are those of Qwen's templates; here they are text like any other.
"""

import json
from collections import Counter
from collections.abc import Iterator

import ujson

from model.data.conversation import TOOL, Conversation, Turn
from model.data.file_request import PART
from model.data.thoughts import CLOSES, split_thought

THINK = "\n/think"  # behind a question that is to be answered with a thought
RESULT, CALL, TOOLS = (f"<{name}>\n{{}}\n</{name}>" for name in ("tool_response", "tool_call", "tools"))


def text_turns(conversation: Conversation, ignored: Counter) -> Iterator[Turn]:
    """The turns that have text, with calls, results and tools in it; an answer keeps its thought beside it.

    An answer before the first question answers none and is not learnt.
    """
    tools, asked = tools_text(conversation.tools), False
    if tools and not any(turn.role == "system" for turn in conversation.turns):
        yield Turn("system", tools)
        tools = ""
    for turn in conversation.turns:
        if turn.role == "assistant":
            turn = _answer(turn)
        elif turn.role == TOOL:
            turn = Turn("user", RESULT.format(turn.text))
        elif turn.role == "system" and tools:
            turn, tools = Turn("system", f"{turn.text}\n\n{tools}"), ""
        asked = asked or turn.role == "user"
        if turn.thought or turn.text and not turn.text.isspace():
            yield turn if asked or turn.role != "assistant" else turn._replace(learnt=False)
        elif len(conversation.turns) > 2:
            ignored[PART, "empty turns"] += 1


def tools_text(tools: str) -> str:
    """What the system says of these tools, the JSON text of a list; "" for none."""
    listed = ujson.loads(tools) if tools else []
    lines = [json.dumps(tool, ensure_ascii=False) for tool in (listed if isinstance(listed, list) else [listed])]
    return TOOLS.format("\n".join(lines)) if lines else ""


def _answer(turn):
    text, thought = turn.text, turn.thought
    if CLOSES in text:
        found, text = split_thought(text)
        thought = thought or found
    text = "\n".join([*filter(None, [text]), *map(CALL.format, turn.calls)])
    return Turn("assistant", text, thought, (), turn.learnt)
