"""Renders a stranger's chat template in a process of its own, which the system ends if it takes much time or memory.

transformers' sandbox keeps a template from files and code, not from loops in loops or texts of gigabytes. Run as a
file, this is that process: a line of JSON in, a line out; it imports nothing of the project.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from functools import cache

RENDER_SECONDS, RENDER_BYTES, MAX_RENDERED_CHARS = 10, 2**30, 2**20  # of a line; real templates take milliseconds
MOST_GROWTH = 8  # times the characters of the messages, beside MAX_RENDERED_CHARS
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers' block around an answer
TOO_MUCH = (
    "it takes more than {} seconds or {:.0f} GiB: put another template in its place, or remove it to use ChatML's"
)
_LOCK = threading.Lock()


def render_all(template: str, requests: list[dict], tokens: dict) -> list[dict]:
    """What a Jinja `template` makes of each request: dict(text, spans) or, with the reason, dict(error).

    A request is dict(messages, tools, prompt, thinking): a list or None, whether the beginning of an answer follows,
    and True, False or, for the template's own choice, None. `spans` are the characters [start, end) of the answers,
    where the template marks them, else None. `tokens` are its variables, such as bos_token.
    """
    limits = dict(seconds=RENDER_SECONDS, held=RENDER_BYTES)
    line = json.dumps(dict(template=template, requests=requests, tokens=tokens, limits=limits))
    with _LOCK:
        child = _child(os.getpid())
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            _child.cache_clear()
            child.communicate()
    return (
        json.loads(answer)
        if answer
        else [dict(error=TOO_MUCH.format(RENDER_SECONDS, RENDER_BYTES / 2**30))] * len(requests)
    )


@cache
def _child(process_id):
    """The process that renders for this one; a forked process has another number, and one of its own."""
    command = [sys.executable, "-P", __file__]  # -P: the modules beside this file do not hide others
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return subprocess.Popen(command, **pipes, text=True, encoding="utf-8")


def _serve():
    """Answer requests until the other process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the other process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else writes among the answers
    from transformers.utils.chat_template_utils import render_jinja_template as render  # takes seconds

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in open(0, encoding="utf-8"):
        request = json.loads(line)
        _limit(**request["limits"])
        shown = (_answer(one, request["template"], request["tokens"], render) for one in request["requests"])
        answers.write(json.dumps(list(shown)) + "\n")
        answers.flush()


def _limit(seconds, held):
    """Have the system end this process after so many more `seconds` of computing, and refuse it `held` more bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds += int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            held += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(request, template, tokens, render_jinja_template):
    options = dict(tools=request["tools"], add_generation_prompt=request["prompt"], **tokens)
    if request["thinking"] is not None:
        options["enable_thinking"] = request["thinking"]
    marks = GENERATION.search(template) is not None
    try:
        (text,), spans = render_jinja_template(
            [request["messages"]], chat_template=template, return_assistant_tokens_mask=marks, **options
        )
        text.encode()
    except MemoryError:
        return dict(error=f"it takes more than {RENDER_BYTES / 2**30:.0f} GiB: put another template in its place")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        return dict(error=f"it shows half a character, {half} (a lone surrogate): write the whole character there")
    except Exception as error:  # a template may raise whatever it likes
        return dict(error=f"{error!s:.200}")
    if len(text) > MAX_RENDERED_CHARS + MOST_GROWTH * len(json.dumps(request, ensure_ascii=False)):
        return dict(error=f"it gives {len(text):,} characters for {len(request['messages'])} turns")
    return dict(text=text, spans=spans[0] if marks else None)


if __name__ == "__main__":
    _serve()
