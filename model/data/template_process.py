"""Renders a stranger's chat template in a process of its own, which the system ends if it takes much time or memory.

transformers' sandbox keeps a template from files and code, not from loops in loops or texts of gigabytes. Run as a
file, this is that process: a line of JSON in, a line out; it imports nothing of the project.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import cache

RENDER_SECONDS, RENDER_BYTES, MAX_RENDERED_CHARS = 10, 2**30, 2**20  # real templates take milliseconds
_LOCK = threading.Lock()


def render(template: str, messages: list[dict], tokens: dict) -> str:
    """The text that a Jinja `template` makes of messages; raises ValueError with the reason if it makes none."""
    limits = dict(seconds=RENDER_SECONDS, held=RENDER_BYTES)
    request = json.dumps(dict(template=template, messages=messages, tokens=tokens, limits=limits))
    with _LOCK:
        child = _child(os.getpid())
        try:
            child.stdin.write(request + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            _child.cache_clear()
            child.communicate()
    if not answer:
        raise ValueError(
            f"it takes more than {RENDER_SECONDS} seconds or {RENDER_BYTES / 2**30:.0f} GiB: put another template in "
            "its place, or remove it to use ChatML's"
        )
    answer = json.loads(answer)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["text"]


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
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in open(0, encoding="utf-8"):
        request = json.loads(line)
        _limit(**request["limits"])
        answers.write(json.dumps(_answer(request, render_jinja_template)) + "\n")
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


def _answer(request, render_jinja_template):
    try:
        shown, _ = render_jinja_template([request["messages"]], chat_template=request["template"], **request["tokens"])
        shown[0].encode()
    except MemoryError:
        return dict(error=f"it takes more than {RENDER_BYTES / 2**30:.0f} GiB: put another template in its place")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        return dict(error=f"it shows half a character, {half} (a lone surrogate): write the whole character there")
    except Exception as error:  # a template may raise whatever it likes
        return dict(error=f"{error!s:.200}")
    if len(shown[0]) > MAX_RENDERED_CHARS:
        return dict(error=f"it gives {len(shown[0]):,} characters for {len(request['messages'])} empty turns")
    return dict(text=shown[0])


if __name__ == "__main__":
    _serve()
