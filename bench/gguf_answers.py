"""A decoder's GGUF files in llama.cpp or Ollama beside our engine and transformers: ids, greedy answers, size.

python -m bench.gguf_answers MODEL_DIR FILE [--questions 64] [--ollama]

Needs llama-cpp-python, or Ollama, beside the packages of `test`. FILE has conversations; the first question of each is
asked. Prints a table row for each type of file.
"""

import argparse
from contextlib import nullcontext
from functools import partial
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
from tests.llama import NEW_TOKENS, answers_of, asked_of, first_difference, greedy_of, open_in_llama_cpp
from tests.ollama import gap_of, ollama_at

IN_LLAMA_CPP = "type", "MiB", "ids of texts", "prompts", "answers equal", "largest first difference, nats"
IN_OLLAMA = "type", "prompts of equal length", "answers equal", "largest first difference, nats"
GREEDY = dict(temperature=0, repeat_penalty=1, num_predict=NEW_TOKENS, num_thread=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--ollama", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = model_directory(options.model_dir)
    chat, theirs = load_chat_model(source, "cpu"), AutoModelForCausalLM.from_pretrained(source).eval()
    questions = first_questions(options.file, options.questions)
    inputs = [prompt_ids(chat, [("user", text)], 400) for text in questions]
    rows = list(zip(questions, inputs, answers_of(chat, inputs), strict=True))
    head = IN_OLLAMA if options.ollama else IN_LLAMA_CPP
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
    with TemporaryDirectory() as folder, ollama_at(Path(folder)) if options.ollama else nullcontext() as ollama:
        ask = partial(asked_in_ollama, ollama) if options.ollama else asked_in_llama_cpp
        for kind in TYPES:
            to_gguf(source, Path(folder, kind), kind)
            cells = ask(Path(folder, kind), rows, chat.tokenizer, theirs)
            print(f"| {' | '.join([kind, *cells])} |", flush=True)


def first_questions(path, count):
    """What the user asks first in the file's first `count` conversations."""
    items = islice(read_items(path, FileRequest()), count)
    return [next(turn.text for turn in item.turns if turn.role == "user")[:200] for item in items]


def asked_in_llama_cpp(directory, rows, tokenizer, theirs):
    """Cells of IN_LLAMA_CPP behind the type, for the (question, ids, answer) of `rows`."""
    (path,) = directory.glob("*.gguf")
    engine, texts = open_in_llama_cpp(path), texts_for(tokenizer)
    ids = sum(engine.tokenize(t.encode(), add_bos=False, special=True) == tokenizer.parse(t) for t in texts)
    there = asked_of(engine, [question for question, _, _ in rows])
    prompts = sum(own == here for own, (_, here, _) in zip(there, rows, strict=True))
    gaps = [first_difference(theirs, here, answer, greedy_of(engine, here)) for _, here, answer in rows]
    left = [gap for gap in gaps if gap is not None]
    counts = f"{ids} of {len(texts)}", f"{prompts} of {len(rows)}", f"{len(rows) - len(left)} of {len(rows)}"
    return f"{path.stat().st_size / 2**20:.1f}", *counts, f"{max(left, default=0):.4f}"


def asked_in_ollama(ollama, directory, rows, tokenizer, theirs):
    """Cells of IN_OLLAMA behind the type, for the (question, ids, answer) of `rows`."""
    ollama.run("create", directory.name, "-f", str(directory / "Modelfile"))
    prompts, gaps = 0, []
    for question, ids, answer in rows:
        messages = [dict(role="user", content=question)]
        found = ollama.ask("chat", model=directory.name, messages=messages, options=GREEDY)
        prompts += found["prompt_eval_count"] == len(ids)
        gaps.append(gap_of(theirs, tokenizer, ids, answer, found["message"]["content"]))
    return f"{prompts} of {len(rows)}", f"{gaps.count(0)} of {len(rows)}", f"{max(gaps):.4f}"


if __name__ == "__main__":
    main()
