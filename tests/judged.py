"""Made-up questions as tasks of lm-evaluation-harness, tiny models to ask, and what its own backends answer."""

import json
import random
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from model.data.sequences import Sequences
from model.data.tokenizer import PROBE
from model.formats.weights import export_model
from model.nn.base import Packing
from model.nn.decoder.family import DECODER
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.ranks import free_port

SERVE = Path(__file__).resolve().parents[1] / "scripts" / "serve.py"
START_SECONDS = 120
LETTERS = "ABCD"
CHOICES = """
task: made_up_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}{{% for c in choices %}}\\n{{{{'ABCD'[loop.index0]}}}}. {{{{c}}}}{{% endfor %}}\\n答案："
doc_to_choice: {choices}
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATED = """
task: made_up_generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["天"], max_gen_toks: 32, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: made_up_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
"""
TASKS = "made_up_letters", "made_up_texts", "made_up_generated", "made_up_rolling"


def write_tasks(folder, count):
    """Write `count` made-up questions to `folder`, and a task file for each of TASKS, which ask about them."""
    draw, path = random.Random(0), Path(folder, "questions.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        dict(question=text(draw, 8, 60), choices=[text(draw, 1, 9) for _ in LETTERS], answer=draw.randrange(4))
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    files = dict(
        letters=CHOICES.format(name="letters", file=path, choices=json.dumps(list(LETTERS))),
        texts=CHOICES.format(name="texts", file=path, choices='"{{choices}}"'),
        generated=GENERATED.format(file=path),
        rolling=ROLLING.format(file=path),
    )
    for name, yaml in files.items():
        Path(folder, f"{name}.yaml").write_text(yaml, encoding="utf-8")


def text(draw, least, most):
    return "".join(draw.choices(PROBE, k=draw.randint(least, most)))


def responses(model, folder, tasks, model_args):
    """{task: what a model of lm-evaluation-harness gives for each question, in their order} and its mean metrics."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model_args = dict(model_args)
    batch_size = model_args.pop("batch_size", 1)
    result = simple_evaluate(
        model=model, model_args=model_args, tasks=list(tasks), task_manager=manager, bootstrap_iters=0,
        batch_size=batch_size, log_samples=True,
    )  # fmt: skip
    samples = {
        task: [sample["resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in result["samples"].items()
    }
    return samples, result["results"]


def write_reciting_decoder(directory, steps=150):
    """A Hugging Face directory of a tiny Qwen with a byte-level tokenizer that has learnt to go on with PROBE."""
    tokenizer, draw = make_qwen_tokenizer(Path(directory, "tokenizer")), random.Random(0)
    sizes = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    model = DecoderModel(DecoderModelConfig(**sizes, vocab_size=tokenizer.vocab_size)).initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        starts = draw.sample(range(len(PROBE) - 20), 24)
        lines = [tokenizer.encode(text(draw, 0, 8) + PROBE[start : start + 20]) for start in starts]
        sides = (np.concatenate(lines).astype(np.int64),)
        batch = DECODER.collate(Sequences(sides, np.array([[len(line)] for line in lines])), Packing(0))
        model.zero_grad()
        (model(batch) / sum(map(len, lines))).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        optimizer.step()
    export_model(model, tokenizer, Path(directory, "best"))
    return Path(directory, "best")


@contextmanager
def served(directory, *words):
    """Context manager that gives the address of a server of the model in `directory`, a process of its own."""
    port = free_port()
    line = [sys.executable, SERVE, directory, "--port", port, *words]
    process = subprocess.Popen([*map(str, line)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.terminate()
        process.wait(30)


def _listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def differences(one, other):
    """(answers that differ, largest difference of two log-likelihoods) of two models' `responses` to one task."""
    flat = [[given for (given,) in question] for question in one], [[g for (g,) in question] for question in other]
    if isinstance(flat[0][0][0], str):
        # ours have no part of a character at their end, and bytes that are no text show other signs amid them
        pairs = [(ours, theirs.rstrip("\ufffd")) for (ours,), (theirs,) in zip(*flat, strict=True)]
        return sum(ours != theirs and bool(theirs) and "\ufffd" not in theirs for ours, theirs in pairs), 0.0
    if isinstance(flat[0][0][0], float):  # of whole texts
        return 0, float(abs(np.array(flat[0]) - np.array(flat[1])).max())
    values = [np.array([[each[0] for each in question] for question in side]) for side in flat]
    greedy = [[[each[1] for each in question] for question in side] for side in flat]
    chosen = [value.argmax(1) for value in values]
    differ = (chosen[0] != chosen[1]) | np.array([a != b for a, b in zip(*greedy, strict=True)])
    return int(differ.sum()), float(abs(values[0] - values[1]).max())


PUBLISHED = """
task: published
dataset_path: csv
dataset_kwargs: {{data_files: {{test: {folder}/test/law.csv, dev: {folder}/dev/law.csv}}}}
test_split: test
fewshot_split: dev
num_fewshot: 2
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
description: "以下是关于法学的单项选择题，请直接给出正确答案的选项。\\n\\n"
doc_to_text: "题目：{{{{Question}}}}\\nA. {{{{A}}}}\\nB. {{{{B}}}}\\nC. {{{{C}}}}\\nD. {{{{D}}}}\\n答案是："
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: "{{{{'ABCD'.index(Answer)}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def write_published(folder, count):
    """Write test/ and dev/ of a made-up subject `law` as CMMLU publishes one, and the task `published` that asks it."""
    draw = random.Random(1)
    for part, number in (("test", count), ("dev", 2)):
        (folder / part).mkdir(parents=True)
        rows = [",".join(["", "Question", *LETTERS, "Answer"])]
        for place in range(number):
            choices = [text(draw, 1, 6) for _ in LETTERS]
            rows.append(",".join([str(place), text(draw, 5, 30), *choices, draw.choice(LETTERS)]))
        (folder / part / "law.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    Path(folder, "published.yaml").write_text(PUBLISHED.format(folder=folder), encoding="utf-8")
