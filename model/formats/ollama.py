"""A Modelfile, with which Ollama makes a model of a GGUF file: template, settings and what ends an answer.

Ollama has a template language of its own. A chat template that writes ChatML is said in it; with any other the prompt
is passed on as it is typed, marks included.
"""

import json
import re

OPENER, CLOSER = "<|im_start|>", "<|im_end|>"
CHATML = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
SYSTEM = re.compile(r"(?:<\|im_start\|>system\n(.*?)<\|im_end\|>\n)?", re.DOTALL)
UNSAID = re.compile('"""|[{}]{2}')  # what would end or change a text of a Modelfile
# settings of generation_config.json, and their names there
DRAWN = dict(temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p")
TALKS = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))


def modelfile(file_name, frames, settings, ends):
    """Text of a Modelfile for the GGUF file of this name beside it.

    `frames` are the TemplateFrames of the chat template, `settings` the values of generation_config.json, `ends` the
    texts that end an answer.
    """
    shown, lines = _as_chatml(frames), [f"FROM ./{file_name}"]
    if shown is None:
        lines += [
            "# The chat template is not ChatML: a prompt is passed on as it is typed, and needs the template's marks.",
            'TEMPLATE """{{ .Prompt }}"""',
        ]
    else:
        system, beginning = shown
        lines += [f'TEMPLATE """{CHATML}{beginning}"""', *([f'SYSTEM """{system}"""'] if system else [])]
    lines += [f"PARAMETER {name} {value}" for name, value in _parameters(settings).items()]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in ends]
    return "\n".join(lines) + "\n"


def _parameters(settings):
    """Ollama's settings. Its own defaults draw, and hold repetition against the model."""
    found = dict(temperature=0)
    if settings.get("do_sample"):
        found = {theirs: settings[ours] for ours, theirs in DRAWN.items() if _is_number(settings.get(ours))}
        found = dict(temperature=1.0, top_k=50, top_p=1.0) | found  # transformers' defaults
    penalty = settings.get("repetition_penalty")
    return found | dict(repeat_penalty=penalty if _is_number(penalty) else 1.0)


def _is_number(value):
    """Whether a stranger's value can be a setting: NaN, infinity and negative numbers cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31


def _as_chatml(frames):
    """(system text where none is given, beginning of an answer) of a template that writes ChatML; None: it does not."""
    talks = [[dict(role=role, content=f"w{number}") for number, role in enumerate(roles)] for roles in TALKS]
    shown = frames.render([dict(messages=talk, tools=None, prompt=True, thinking=None) for talk in talks])
    systems, beginnings = set(), set()
    for talk, one in zip(talks, shown, strict=True):
        turns = "".join(f"{OPENER}{turn['role']}\n{turn['content']}{CLOSER}\n" for turn in talk)
        before, found, beginning = one.get("text", "").partition(turns)
        if not (found and beginning.startswith(f"{OPENER}assistant\n") and (system := SYSTEM.fullmatch(before))):
            return None
        beginnings.add(beginning)
        if talk[0]["role"] != "system":
            systems.add(system[1] or "")
        elif before:
            return None
    said = "".join((*systems, *beginnings))
    return (*systems, *beginnings) if len(systems) == len(beginnings) == 1 and not UNSAID.search(said) else None
