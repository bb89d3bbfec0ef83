"""Writes the token store of large files in a process of its own.

Meanwhile the run compiles kernels on threads, with which tokenising would share an interpreter. The process reads a
line of JSON from its standard input and writes one for each batch of rows, or for an error.
"""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from model.data.span_noise import Noise
from model.data.store_writer import write_store
from model.data.token_store import Source
from model.data.tokenizer import load_tokenizer
from model.runtime.module_process import start_module
from model.train.objectives.mixed import Mixed
from model.train.objectives.pairs import Pairs
from model.train.objectives.prefix import Prefix
from model.train.objectives.spans import Spans
from model.train.objectives.text import Text

# Objectives that can be sent. Of the others, dialogues have their template in another process already, and preferences
# would import torch there.
KINDS = Pairs, Text, Spans, Prefix
LARGE_BYTES = 4 << 20  # smaller files are tokenised in two seconds or less, and a process takes half a second to start


def write_beside(source, key, directory, progress, stop):
    """Do as `write_store`, in a process of its own if the files are large and all objectives can be sent.

    Raises as `write_store`, and ChildProcessError if that process is killed.
    """
    is_small = sum(file["size"] for file in key["files"]) < LARGE_BYTES
    parts = source.objective.parts if isinstance(source.objective, Mixed) else [source.objective]
    if is_small or not all(isinstance(part, KINDS) for part in parts):
        write_store(source, key, directory, progress, stop)
        return
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with start_module("model.commands.tokenising", **pipes) as child:
        print(_request(source, key, directory), file=child.stdin, flush=True)
        for line in child.stdout:
            if stop():
                child.stdout.close()  # at its next line it finds this, deletes its draft and ends
                child.wait()
                raise KeyboardInterrupt
            _pass_on(json.loads(line), progress)
    if code := child.returncode:
        raise ChildProcessError(
            f"the process that tokenises ended with code {code} (-9: it was killed, most often because the machine's "
            "memory ran out): close what else uses memory, then type the same command again"
        )


def _request(source, key, directory):
    values = dict(
        paths=list(map(str, source.paths)), objective=_described(source.objective), columns=source.columns, key=key,
        tokenizer=str(source.tokenizer.directory), eos_id=source.tokenizer.eos_id, max_seq_len=source.max_seq_len,
        directory=str(directory),
    )  # fmt: skip
    return json.dumps(values)


def _described(objective):
    """Plain values of an objective, for `_objective_of`."""
    if isinstance(objective, Mixed):
        return dict(parts=[_described(part) for part in objective.parts])
    return dict(kind=type(objective).__name__, values=asdict(objective))


def _objective_of(described):
    if "parts" in described:
        return Mixed(tuple(map(_objective_of, described["parts"])))
    (kind,) = (kind for kind in KINDS if kind.__name__ == described["kind"])
    values = described["values"]
    return kind(**values | (dict(noise=Noise(**values["noise"])) if "noise" in values else {}))


def _pass_on(said, progress):
    """Report the rows, or raise the error, that a line of the other process tells of."""
    if "refused" in said:
        raise ValueError(said["refused"])
    if "failed" in said:
        raise OSError(*said["failed"])
    if progress:
        progress(said["rows"])


def main():
    """Write the store that a line of standard input asks for. Returns 1 if the run that asked has ended, else 0."""
    logging.disable()  # what there is to say of the tokenizer was said by the run
    line = sys.stdin.readline()
    if not line:
        return 1
    try:
        _write(json.loads(line))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it at the end
        return 1
    except ValueError as error:
        _tell(refused=str(error))
    except OSError as error:
        _tell(failed=[error.errno, error.strerror, error.filename and str(error.filename)])
    return 0


def _write(request):
    objective = _objective_of(request["objective"])
    tokenizer = replace(load_tokenizer(request["tokenizer"]), eos_id=request["eos_id"])  # that of the template, perhaps
    readers = objective.readers if isinstance(objective, Mixed) else ()
    source = Source(request["paths"], objective, tokenizer, request["max_seq_len"], request["columns"], readers)
    write_store(source, request["key"], Path(request["directory"]), lambda rows: _tell(rows=rows), lambda: False)


def _tell(**values):
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(main())
