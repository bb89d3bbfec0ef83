"""A decoder's GGUF files in Ollama beside our engine and transformers: prompts, greedy answers, in each type.

python -m bench.ollama_answers MODEL_DIR FILE [--questions 64]

Needs Ollama beside the packages of `test`. FILE has conversations; the first question of each is asked.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM

from bench.gguf_answers import first_questions
from model.formats.conversions import to_gguf
from model.formats.gguf_file import TYPES
from model.formats.weights import model_directory
from model.serve.answering import load_chat_model, prompt_ids
from tests.llama import NEW_TOKENS, answers_of
from tests.ollama import gap_of, ollama_at

GREEDY = dict(temperature=0, repeat_penalty=1, num_predict=NEW_TOKENS, num_thread=1)


def compare(ollama, name, rows, gap):
    """(prompts of equal length, equal answers, largest first difference in nats) of (question, ids, answer) rows."""
    prompts, gaps = 0, []
    for question, ids, answer in rows:
        found = ollama.ask("chat", model=name, messages=[dict(role="user", content=question)], options=GREEDY)
        prompts += found["prompt_eval_count"] == len(ids)
        gaps.append(gap(ids, answer, found["message"]["content"]))
    return prompts, gaps.count(0), max(gaps)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=64)
    options = parser.parse_args()
    directory = model_directory(options.model_dir)
    chat, theirs = load_chat_model(directory, "cpu"), AutoModelForCausalLM.from_pretrained(directory).eval()
    questions = first_questions(options.file, options.questions)
    inputs = [prompt_ids(chat, [("user", text)], 400) for text in questions]
    rows = list(zip(questions, inputs, answers_of(chat, inputs), strict=True))
    print(
        "| type | prompts of equal length | answers equal | largest first difference, nats |\n| --- | --- | --- | --- |"
    )
    with TemporaryDirectory() as folder, ollama_at(Path(folder)) as ollama:
        for kind in TYPES:
            to_gguf(directory, Path(folder, kind), kind)
            ollama.run("create", kind, "-f", str(Path(folder, kind, "Modelfile")))
            prompts, equal, gap = compare(ollama, kind, rows, lambda *row: gap_of(theirs, chat.tokenizer, *row))
            print(f"| {kind} | {prompts} of {len(rows)} | {equal} of {len(rows)} | {gap:.4f} |")


if __name__ == "__main__":
    main()
