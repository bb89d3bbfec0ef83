"""Writes the token store of large files in a process of its own.

Meanwhile the run compiles kernels on threads, with which tokenising would share an interpreter. The process reads a
line of JSON from its standard input and writes one for each batch of rows, or for an error.
"""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from model.data.store_writer import write_store
from model.data.token_store import Source
from model.data.tokenizer import load_tokenizer
from model.runtime.module_process import start_module
from model.train.objectives.pairs import Pairs

LARGE_BYTES = 4 << 20  # smaller files are tokenised in two seconds or less, and a process takes half a second to start


def write_beside(source, key, directory, progress, stop):
    """Do as `write_store`, in a process of its own if the files are large and hold pairs.

    Raises as `write_store`, and ChildProcessError if that process is killed.
    """
    is_small = sum(file["size"] for file in key["files"]) < LARGE_BYTES
    if is_small or not isinstance(source.objective, Pairs):  # dialogues need another process, for their template
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
        paths=list(map(str, source.paths)), objective=asdict(source.objective), columns=source.columns, key=key,
        tokenizer=str(source.tokenizer.directory), max_seq_len=source.max_seq_len, directory=str(directory),
    )  # fmt: skip
    return json.dumps(values)


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
    objective, tokenizer = Pairs(**request["objective"]), load_tokenizer(request["tokenizer"])
    source = Source(request["paths"], objective, tokenizer, request["max_seq_len"], request["columns"])
    write_store(source, request["key"], Path(request["directory"]), lambda rows: _tell(rows=rows), lambda: False)


def _tell(**values):
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(main())
