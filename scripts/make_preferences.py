"""Make preferences of your own model: the right answers of a file are chosen, the model's answers are rejected.

    python scripts/make_preferences.py MODEL_DIR FILE --output preferences.jsonl [--rows 5000] [--samples 4]

MODEL_DIR is a Hugging Face directory, an adapter's or a run directory. FILE is any file that trains pairs; of each
conversation the last answer is compared. The model answers greedily, or with --samples so often that the worst answer
can be taken: one that repeats itself, else one that does not end, else the one whose length is farthest off. Rows whose
answer the model gives itself are left out. A command that was stopped goes on when it is typed again. Then train:

    python train_low_mem.py train --objective=dpo --train_file=preferences.jsonl --finetune_from_ckp_file=MODEL_DIR …

Exit codes: 0 written, 2 refused, 1 the rest.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.cgroup import limit_threads  # noqa: E402
from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
limit_threads()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only local files are read

from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.file_request import describe_ignored  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.display.console import Progress, duration  # noqa: E402
from model.generate.sampling import Sampling  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402
from model.serve.answering import load_chat_model  # noqa: E402
from model.serve.preference_making import (  # noqa: E402
    KEPT,
    REASONS,
    Asking,
    conversations_in,
    finish,
    header_of,
    make_preferences,
)

SAMPLED_TEMPERATURE = 0.8


def parse(words: list[str]) -> argparse.Namespace:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--rows", type=int, default=0, help="conversations of FILE, the first ones; 0: all")
    parser.add_argument("--samples", type=int, default=1, help="answers, of which the worst is taken; 1: a greedy one")
    parser.add_argument(
        "--temperature",
        type=float,
        help=f"above 0: answers are drawn; default: 0, with --samples {SAMPLED_TEMPERATURE}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="of an answer, at most (%(default)s)")
    parser.add_argument("--max_prompt_tokens", type=int, default=1024, help="rows with a longer question are left out")
    parser.add_argument("--slots", type=int, default=0, help="answers together; 0: 256 on a GPU, 64 on a CPU")
    parser.add_argument("--prompt_column", default="", help="found by name where it is not typed")
    parser.add_argument("--response_column", default="", help="found by name where it is not typed")
    parser.add_argument("--overwrite", action="store_true", help="replace the output, and begin again")
    options = parser.parse_args(words)
    for name, least in (("rows", 0), ("samples", 1), ("max_new_tokens", 1), ("max_prompt_tokens", 8), ("slots", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}={getattr(options, name)}: must be at least {least}")
    return options


def run(options: argparse.Namespace) -> None:
    """Write the preferences and print what was written; ValueError for what does not go together."""
    output, text = options.output, texts_here()
    if output.suffix != ".jsonl" or output.is_dir():
        raise ValueError(f"--output={output}: name a .jsonl file")
    if not options.file.exists():
        raise ValueError(f"{options.file}: no such file")
    draft = output.with_name(f"{output.name}.part")
    if options.overwrite:
        draft.unlink(missing_ok=True)
    elif output.exists():
        raise ValueError(f"--output={output} exists already: name another file, or type --overwrite")
    temperature = options.temperature
    if temperature is None:
        temperature = SAMPLED_TEMPERATURE if options.samples > 1 else 0.0
    if options.samples > 1 and not temperature:
        raise ValueError(f"--samples={options.samples} --temperature=0: greedy answers are all the same: leave one out")
    chat = load_chat_model(options.model_dir)
    slots = options.slots or (256 if chat.model.device.type == "cuda" else 64)
    most = chat.prompt_tokens(options.max_prompt_tokens, options.max_new_tokens)
    sampling = Sampling(temperature=temperature, seed=options.seed)
    asking = Asking(sampling, options.samples, options.max_new_tokens, most, slots)
    columns, ignored, started = (options.prompt_column, options.response_column), Counter(), time.monotonic()
    conversations = conversations_in(options.file, columns, options.rows, ignored)
    header = header_of(chat, options.file, columns, asking) | dict(rows=options.rows)
    output.parent.mkdir(parents=True, exist_ok=True)
    with Progress(text("preferences.doing"), options.rows or None, unit="rows") as progress:
        make_preferences(chat, conversations, asking, draft, header, progress.update)
    counts = finish(draft, output)
    print("\n".join(report(output, counts, time.monotonic() - started, text)))
    if said := describe_ignored(ignored, lambda name: text(f"ignored.{name}")):
        print(said)
    if not counts[KEPT]:
        output.unlink()
        raise ValueError(
            f"no row of {options.file} gave a preference, so {output} is not kept: "
            "give more rows, or a model that answers otherwise than the file"
        )


def report(output: Path, counts: Counter, seconds: float, text) -> list[str]:
    """What was written, in words."""
    kept = counts[KEPT]
    lines = [text("preferences.written", output=output, count=kept, time=duration(seconds, text))]
    if kept:
        shares = {name: counts[name] / kept for name in ("loops", "ended", "right_loops")}
        length = counts["rejected"] / max(counts["chosen"], 1)
        lines.append(text("preferences.answers", length=length, **shares))
    lines += [text(f"preferences.{reason}", count=counts[reason]) for reason in REASONS if counts[reason]]
    return lines


def main(words: list[str]) -> int:
    options = parse(words)
    try:
        run(options)
    except KeyboardInterrupt:
        print(texts_here()("preferences.stopped"), file=sys.stderr)
    except (ValueError, RuntimeError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
