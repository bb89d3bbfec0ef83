"""How a decoder-only network reads a dialogue: the chat template of its tokenizer.

The template (Jinja, rendered in transformers' sandbox in a process of its own) seldom sees a text. For plain dialogues
it is rendered with a placeholder for each turn, once for each order of roles, around the ids of each turn's text.
Conversations with thoughts, calls or tools, and texts that the template looks into, are rendered as they are. Either
way no text is parsed as a control token, the ids are those of apply_chat_template, and where each answer begins and
ends is known.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from model.data.conversation import TOOL, Conversation, Turn
from model.data.default_template import default_template
from model.data.encoded_dialogue import EncodedDialogue
from model.data.file_request import PART
from model.data.framed import encode_framed, framed_question
from model.data.rendered import encode_talks, rendered_question
from model.data.template_frames import TemplateFrames
from model.data.thoughts import CLOSES, split_thought
from model.data.tokenizer import ChatTokenizer
from model.data.tokenizer_file import load_settings

TEMPLATE_FILE, MAX_TEMPLATE_CHARS = "chat_template.jinja", 1 << 16
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_TURNS = 4096  # of a dialogue, the oldest beyond are left out


@dataclass(frozen=True)
class TurnTemplate:
    """A tokenizer's chat template, in which dialogues become ids; with `learn_empty_thoughts` these are learnt too."""

    tokenizer: ChatTokenizer
    text: str
    learn_empty_thoughts: bool = False

    @cached_property
    def frames(self) -> TemplateFrames:
        return TemplateFrames(self.tokenizer, self.text, self.learn_empty_thoughts)

    @property
    def end_id(self) -> int:
        """The token that ends an answer."""
        return self.frames.end_id

    def encode_dialogues(
        self, conversations: list[Conversation], ignored: Counter | None = None
    ) -> list[EncodedDialogue | None]:
        """Each conversation, the texts of all of them encoded together; None for one without a learnt answer.

        What the template cannot say is left out and counted in `ignored`. Raises ValueError for a template that shows
        no dialogue.
        """
        self.frames.frame(("user", "assistant"))
        ignored = Counter() if ignored is None else ignored
        talks = [(self.said(one, ignored), one.tools if self.frames.can.tools else "") for one in conversations]
        if not self.frames.can.tools and (num_lists := sum(bool(one.tools) for one in conversations)):
            ignored[PART, "lists of tools"] += num_lists
        framed, rendered = [], []
        for place, (turns, tools) in enumerate(talks):
            if any(turn.role == "assistant" and turn.learnt for turn in turns):
                (framed if self._is_framed(turns, tools) else rendered).append(place)
        found = dict(zip(framed, encode_framed(self.frames, [talks[place][0] for place in framed]), strict=True))
        found |= zip(rendered, encode_talks(self.frames, [talks[place] for place in rendered], ignored), strict=True)
        return [found.get(place) for place in range(len(talks))]

    def said(self, conversation: Conversation, ignored: Counter) -> list[Turn]:
        """The turns that the template can show, without what it cannot, which is counted in `ignored`.

        An answer before the first question answers none and is not learnt.
        """
        can, shown, asked = self.frames.can, [], False
        for turn in conversation.turns:
            if turn.role == "assistant":
                turn = self._answer(turn, asked, ignored)
            elif not can.header:
                turn = turn._replace(text=turn.text.strip())
            asked = asked or turn.role == "user"
            if turn.role == TOOL and not can.results:
                ignored[PART, "results of tools"] += 1
            elif turn.calls or turn.thought or turn.text and not turn.text.isspace():
                shown.append(turn)
            elif len(conversation.turns) > 2:
                ignored[PART, "empty turns"] += 1
        num_system = sum(turn.role == "system" for turn in shown[:1])
        return [*shown[:num_system], *_newest(shown[num_system:])]

    def _answer(self, turn, asked, ignored):
        can, (text, thought, calls) = self.frames.can, (turn.text, turn.thought, turn.calls)
        if can.thoughts and CLOSES in text:
            found, text = split_thought(text)
            thought = thought or found
        if thought and not (can.thoughts and can.header):
            ignored[PART, "thoughts"] += 1
            thought = ""
        if calls and not (can.calls and can.header):
            ignored[PART, "calls of tools"] += len(calls)
            calls = ()
        text = text if can.header else text.strip()
        return Turn("assistant", text, thought, calls, turn.learnt and asked)

    def _is_framed(self, turns, tools):
        """Whether the frame of the turns' roles, and of their thoughts, shows them as the template would."""
        if not any(turn.thought for turn in turns):
            return self._is_plain(turns, tools)
        without = [turn._replace(thought="") for turn in turns]
        thoughts = [Turn(turn.role, turn.thought) for turn in turns if turn.thought]
        has_texts = all(turn.text for turn in without)
        is_plain = has_texts and self._is_plain(without, tools) and self._is_plain(thoughts, "")
        return is_plain and self.frames.has_thought_frames and self.frames.shows(turns)

    def _is_plain(self, turns, tools):
        """Whether the frame of the turns' roles shows them as the template would."""
        if not self.frames.can.header:
            return True
        return self.frames.has_plain_frames and not tools and all(map(self._is_plain_turn, turns))

    def _is_plain_turn(self, turn):
        text = turn.text
        is_text = not (turn.thought or turn.calls or turn.role == TOOL)
        return is_text and text == text.strip() and not self.frames.looked_for.search(text)

    def encode_question(
        self, turns: list[Turn], max_tokens: int, tools: str = "", thinking: bool | None = None
    ) -> list[int]:
        """Ids that a network reads to answer the last of `turns`, the user's or a tool's, at most `max_tokens`.

        `tools` is the JSON text of those that may be called; `thinking` asks for a thought or against one, where the
        template has a switch for it. When there are more ids, the oldest turns but the system's go first, as many as
        rendering shows to be needed; then the question loses its end. Only a system text that leaves no room for the
        question gives more. Raises ValueError if the last turn is an answer.
        """
        turns = self.said(Conversation(turns), Counter())
        if not turns or turns[-1].role not in ("user", TOOL):
            raise ValueError(
                "the last turn of a conversation must be the user's, with text in it: it is what is answered"
            )
        tools = tools if self.frames.can.tools else ""
        if self._is_plain(turns, tools) and not self._changes_beginning(thinking):
            return framed_question(self.frames, turns, max_tokens)
        thinking = bool(thinking) if self.frames.can.has_switch else None
        return rendered_question(self.frames, turns, max_tokens, tools, thinking)

    def knows_question(self, turns: list[Turn], tools: str = "", thinking: bool | None = None) -> bool:
        """Whether `encode_question` has made the frame of these turns' roles before, so that it renders nothing."""
        roles = tuple(turn.role for turn in turns)
        if roles not in self.frames.arranged or (*roles, "assistant") not in self.frames.frames:
            return False
        is_shown = len(self.said(Conversation(turns), Counter())) == len(turns)
        return is_shown and self._is_plain(turns, tools) and not self._changes_beginning(thinking)

    def _changes_beginning(self, thinking):
        """Whether a prompt ends otherwise than what stands before an answer in the frames."""
        return not self.frames.beginning.endswith(self.frames.can.prompts[bool(thinking)])

    def opens_thought(self, thinking: bool | None) -> bool:
        """Whether an answer begins inside a thought, which the template opens itself."""
        return self.frames.can.opens_thought[bool(thinking)]


def _newest(turns):
    """The last MAX_TURNS of the turns, from a question on where older ones are left out: many templates demand it."""
    if len(turns) <= MAX_TURNS:
        return turns
    kept = turns[-MAX_TURNS:]
    return kept[next((place for place, turn in enumerate(kept) if turn.role == "user"), 0) :]


@cache
def turn_template(tokenizer: ChatTokenizer, learn_empty_thoughts: bool = False) -> TurnTemplate:
    """The TurnTemplate of a tokenizer: of its chat_template.jinja, its tokenizer_config.json, or the default.

    Raises ValueError for one that is damaged or too large.
    """
    path = Path(tokenizer.directory, TEMPLATE_FILE)
    text = _own_template(path)
    text = default_template(tokenizer) if text is None else text
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARS or SURROGATE.search(text):
        raise ValueError(
            f"{path}: a chat template must be a text of at most {MAX_TEMPLATE_CHARS:,} characters, none of them half a "
            "character (a lone surrogate such as \\ud83d)"
        )
    return TurnTemplate(tokenizer, text, learn_empty_thoughts)


def _own_template(path):
    """The template at `path` or in the tokenizer_config.json beside it; None if there is none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else load_settings(path.parent).get("chat_template")
    if isinstance(text, list):  # several, each with a name
        named = (one.get("template") for one in text if isinstance(one, dict) and one.get("name") == "default")
        return next(named, None)
    return text


def with_turn_end(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """`tokenizer`, for which an answer ends where its template ends it."""
    return replace(tokenizer, eos_id=turn_template(tokenizer).end_id)


def write_turn_template(tokenizer: ChatTokenizer, directory: str | Path) -> None:
    """Write the template to a directory that holds a copy of the tokenizer's files, unless one of them has it."""
    path = Path(directory, TEMPLATE_FILE)
    if _own_template(path) is None:
        path.write_text(turn_template(tokenizer).text, encoding="utf-8")
