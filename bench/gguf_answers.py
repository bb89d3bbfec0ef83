"""A decoder's GGUF files in llama.cpp beside our engine and transformers: ids, greedy answers, size.

python -m bench.gguf_answers MODEL_DIR FILE [--questions 64]

Needs llama-cpp-python beside the packages of `test`. FILE has conversations; the first question of each is asked.
"""

import argparse
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from model.data.file_request import FileRequest
from model.data.readers import read_items
from model.formats.conversions import to_gguf
from model.formats.gguf_file import TYPES
from model.formats.gguf_vocabulary import texts_for
from model.formats.weights import model_directory
from model.serve.answering import load_chat_model, prompt_ids
from tests.llama import answers_of, asked_of, first_difference, greedy_of, open_in_llama_cpp


def first_questions(path, count):
    """What the user asks first in the file's first `count` conversations."""
    items = islice(read_items(path, FileRequest()), count)
    return [next(turn.text for turn in item.turns if turn.role == "user")[:200] for item in items]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = model_directory(options.model_dir)
    chat, theirs = load_chat_model(source, "cpu"), AutoModelForCausalLM.from_pretrained(source).eval()
    talks = first_questions(options.file, options.questions)
    inputs = [prompt_ids(chat, [("user", text)], 400) for text in talks]
    answers = answers_of(chat, inputs)
    for kind in TYPES:
        with TemporaryDirectory() as folder:
            to_gguf(source, Path(folder, kind), kind)
            (path,) = Path(folder, kind).glob("*.gguf")
            engine = open_in_llama_cpp(path)
            texts = texts_for(chat.tokenizer)
            ids = sum(
                engine.tokenize(t.encode(), add_bos=False, special=True) == chat.tokenizer.parse(t) for t in texts
            )
            asked = sum(there == here for there, here in zip(asked_of(engine, talks), inputs, strict=True))
            others = [greedy_of(engine, row) for row in inputs]
            gaps = [first_difference(theirs, *rows) for rows in zip(inputs, answers, others, strict=True)]
            left = [gap for gap in gaps if gap is not None]
            print(
                f"| {kind} | {path.stat().st_size / 2**20:.1f} | {ids} of {len(texts)} | {asked} of {len(talks)} | "
                f"{len(gaps) - len(left)} of {len(gaps)} | {max(left, default=0):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
