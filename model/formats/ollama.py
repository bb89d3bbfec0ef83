"""A Modelfile, with which Ollama makes a model of a GGUF file: template, settings and what ends an answer.

Ollama has a template language of its own, Go's. A chat template that writes every turn alike, its role's name within
marks (ChatML, Llama 3), is said in it; with any other the prompt is passed on as it is typed, marks included.
"""

import json
import re
from dataclasses import dataclass, replace
from os.path import commonprefix

ROLES = ("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user")
MARK = re.compile(r"[<\[]")
THOUGHT = "<think>\n{}\n</think>\n\n"
NO_THOUGHT = THOUGHT.format("")
LAST_QUESTION = (
    '{{- $last := -1 }}{{- range $i, $_ := .Messages }}{{ if eq .Role "user" }}{{ $last = $i }}{{ end }}{{ end -}}\n'
)
UNSAID = re.compile('"""|[{}]{2}')  # what would end or change a text of a Modelfile
# settings of generation_config.json, and their names there
DRAWN = dict(temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p")
WHOLE = "top_k", "num_predict"  # Ollama takes no 50.0


@dataclass(frozen=True)
class TurnForm:
    """What a chat template that writes every turn alike writes around a role and its text."""

    start: str  # before the first turn
    opener: str  # before a role's name
    after: str  # between it and the text
    closer: str
    opening: str  # behind the header of the answer that is asked for
    system: str = ""  # the system's text where none is given
    has_switch: bool = False  # a thought may be asked against; one is written behind the last question alone

    def shown(self, talk):
        """A prompt for the answer to (role, text) pairs."""
        given = [("system", self.system), *talk] if self.system and talk[0][0] != "system" else talk
        turns = "".join(f"{self.opener}{role}{self.after}{text}{self.closer}" for role, text in given)
        return f"{self.start}{turns}{self.opener}assistant{self.after}{self.opening}"

    def system_in(self, prompt):
        """The system's text in the prompt of ROLES[0], which has none of its own."""
        own = self.shown([("user", "w0")])
        begins, ends = f"{self.start}{self.opener}system{self.after}", self.closer + own.removeprefix(self.start)
        return prompt[len(begins) : -len(ends)] if prompt.startswith(begins) and prompt.endswith(ends) else ""

    def in_go(self):
        """The same in Ollama's template language."""
        header, thought = f"{self.opener}{{{{ .Role }}}}{self.after}", ""
        ending = f"{self.opener}assistant{self.after}{self.opening}"
        if self.has_switch:
            thought = THOUGHT.format("{{ .Thinking }}")
            thought = f"{{{{ if and .Thinking (gt $i $last) }}}}{thought}{{{{ end }}}}"
            ending += f"{{{{ if and .IsThinkSet (not .Think) }}}}{NO_THOUGHT}{{{{ end }}}}"
        turns = f"{header}{thought}{{{{ .Content }}}}{self.closer}{{{{ end }}}}"
        if self.has_switch:
            return f"{LAST_QUESTION}{self.start}{{{{ range $i, $_ := .Messages }}}}{turns}{ending}"
        return f"{self.start}{{{{ range .Messages }}}}{turns}{ending}"


def modelfile(file_name, frames, settings, ends):
    """Text of a Modelfile for the GGUF file of this name beside it.

    `frames` are the TemplateFrames of the chat template, `settings` the values of generation_config.json, `ends` the
    texts that end an answer.
    """
    form, lines = _form_of(frames), [f"FROM ./{file_name}"]
    if form is None:
        lines += [
            "# The chat template cannot be said here: a prompt is passed on as typed, and needs the template's marks.",
            'TEMPLATE """{{ .Prompt }}"""',
        ]
    else:
        lines += [f'TEMPLATE """{form.in_go()}"""', *([f'SYSTEM """{form.system}"""'] if form.system else [])]
    lines += [f"PARAMETER {name} {value}" for name, value in _parameters(settings).items()]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in ends]
    return "\n".join(lines) + "\n"


def _parameters(settings):
    """Ollama's settings. Its own defaults draw, and hold repetition against the model."""
    found = dict(temperature=0)
    if settings.get("do_sample"):
        found = {theirs: settings[ours] for ours, theirs in DRAWN.items() if _is_number(settings.get(ours))}
        found = dict(temperature=1.0, top_k=50, top_p=1.0) | found  # transformers' defaults
    penalty, length = settings.get("repetition_penalty"), settings.get("max_new_tokens")
    found |= dict(repeat_penalty=penalty if _is_number(penalty) else 1.0)
    found |= dict(num_predict=length) if length and _is_number(length) else {}
    return {name: int(value) if name in WHOLE else value for name, value in found.items()}


def _is_number(value):
    """Whether a stranger's value can be a setting: NaN, infinity and negative numbers cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31


def _form_of(frames):
    """The TurnForm of a chat template; None if it does not write every turn alike."""
    talks = [[(role, f"w{number}") for number, role in enumerate(roles)] for roles in ROLES]
    shown = _shown(frames, [dict(messages=_messages(talk), prompt=True) for talk in talks])
    form = _form_in(shown[-1])
    if form is None:
        return None
    form = replace(form, system=form.system_in(shown[0]))
    texts = (form.start, form.opener, form.after, form.closer, form.opening, form.system)
    is_said = [form.shown(talk) for talk in talks] == shown and not any(map(UNSAID.search, texts))
    return replace(form, has_switch=_has_switch(frames, form)) if is_said else None


def _form_in(text):
    """The TurnForm that shows the last of ROLES as this text, its system text aside; None if none does."""
    pieces = re.split("w[0-3]", text)
    if len(pieces) != 5:
        return None
    head, *joins, ending = pieces
    between, _, after = joins[0].rpartition("user")
    answered, before = f"{between}assistant{after}", head.removesuffix(f"system{after}")
    common = commonprefix([between[::-1], before[::-1]])[::-1]
    mark = MARK.search(common)
    if not mark or before == head or joins != [joins[0], answered, joins[0]] or not ending.startswith(answered):
        return None
    opener = common[mark.start() :]
    around = before.removesuffix(opener), opener, after, between.removesuffix(opener)
    return TurnForm(*around, ending.removeprefix(answered))


def _has_switch(frames, form):
    """Whether an answer has a thought unless one is asked against, and only the newest answer's is shown."""
    question, answer = _messages([("user", "w0"), ("assistant", "w1")])
    answer["reasoning_content"] = "w2"
    asked = [dict(messages=[question], prompt=True, thinking=thinking) for thinking in (None, True, False)]
    thought = [dict(messages=[question, answer]), dict(messages=[question, answer, question], prompt=True)]
    plain, thinking, not_thinking, newest, older = _shown(frames, [*asked, *thought])
    is_newest = newest == f"{plain}{THOUGHT.format('w2')}w1{form.closer}"
    is_older = older == form.shown([("user", "w0"), ("assistant", "w1"), ("user", "w0")])
    return thinking == plain and not_thinking == f"{plain}{NO_THOUGHT}" and is_newest and is_older


def _messages(talk):
    return [dict(role=role, content=text) for role, text in talk]


def _shown(frames, requests):
    """Texts that the template makes of these requests, "" where it refuses one."""
    plain = dict(tools=None, prompt=False, thinking=None)
    return [one.get("text", "") for one in frames.render([plain | request for request in requests])]
