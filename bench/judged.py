"""Our answers to lm-evaluation-harness beside those of its own Hugging Face backend, in float32, for made-up questions.

    python -m bench.judged [--questions 500]

Needs the extra packages [eval] and [serve]. A decoder that has learnt a text is asked through scripts/serve.py (by
lm_eval's local-completions) and through our model chat_trainer, a T5 that knows three answers through the latter. One
line for each task: questions, how many are answered otherwise, the largest difference of two log-likelihoods, seconds
of both.
"""

import argparse
import tempfile
import time
from pathlib import Path

import model.serve.lm_eval_model  # registers chat_trainer  # noqa: F401
from tests.judged import TASKS, differences, responses, served, write_reciting_decoder, write_tasks
from tests.knowing import write_knowing_model


def main():
    parser = argparse.ArgumentParser(description="Our answers to lm-evaluation-harness beside those of its backend.")
    parser.add_argument("--questions", type=int, default=500)
    count = parser.parse_args().questions
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "tasks")
        write_tasks(tasks, count)
        decoder, t5 = write_reciting_decoder(Path(folder, "decoder")), Path(folder, "t5")
        write_knowing_model(t5)
        theirs = dict(dtype="float32", device="cpu")
        with served(decoder) as address:
            ours = dict(base_url=address, model=str(decoder), tokenizer_backend="huggingface", max_length=1024)
            pair = ("local-completions", ours | dict(batch_size=32)), ("hf", theirs | dict(pretrained=str(decoder)))
            compare("decoder, local-completions", tasks, TASKS, *pair)
        pair = ("chat_trainer", dict(pretrained=str(decoder))), ("hf", theirs | dict(pretrained=str(decoder)))
        compare("decoder, chat_trainer", tasks, TASKS, *pair)
        pair = ("chat_trainer", dict(pretrained=str(t5))), ("hf", theirs | dict(pretrained=str(t5), backend="seq2seq"))
        compare("T5, chat_trainer", tasks, TASKS[:3], *pair)


def compare(what, tasks, names, ours, theirs):
    for name in names:
        answered, seconds = [], []
        for model_name, options in (ours, theirs):
            started = time.monotonic()
            answered.append(responses(model_name, tasks, [name], options)[0][name])
            seconds.append(time.monotonic() - started)
        differ, most = differences(*answered)
        print(
            f"{what}, {name}: {len(answered[0])} questions, {differ} answered otherwise, log-likelihoods differ by at "
            f"most {most:.1e}; {seconds[0]:.1f} s beside {seconds[1]:.1f}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
