"""Shared by the fault harnesses: runs that are disturbed and resumed, compared with an undisturbed run, and reports.

Each harness prints one JSON line per trial and writes its table between its own marks in bench/results/faults.md.
"""

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from model.data.tokenizer import load_tokenizer
from model.formats.weights import export_model
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.runtime import fault_injection
from tests.ranks import ROOT
from tests.tiny import NUM_PAIRS, ids_by_epoch, start, train, wait_for, weights_hash
from train_low_mem import main

FAULTS_PAGE = Path(os.environ.get("FAULTS_PAGE", ROOT / "bench" / "results" / "faults.md"))
TRAIN_LINE = b'"kind":"train"'
SLEEP_SECONDS = 0.2
QWEN_SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
WITH_KERNELS = dict(model="tiny", dropout=0, deterministic=True)  # options of a run on GPUs
# options of a run that records each step, and sends its gradients in several parts while backward runs
RECORDED = dict(model="wide.json", dropout=0, deterministic=True, compile=True, micro_batch_tokens=None)
WIDE = dict(d_model=256, d_ff=1024, num_heads=4, d_kv=64, num_layers=3, num_decoder_layers=3)


class Disturbed:
    """A tiny run in `home` that is disturbed repeatedly and must end with the same result as an undisturbed one."""

    def __init__(self, home, name, world, function=main, **options):
        self.home, self.name, self.world, self.function = home, name, world, function
        self.options = dict(dropout=0.1) | options
        self.dir = home / name

    def start(self, fault="", **changes):
        """Start the run, from its checkpoint if there is one; returns its processes."""
        for path in self.home.glob("rank*.txt"):
            path.unlink()
        return start(
            self.home, self.world, fault, output_dir=self.name, is_keep_training="auto", function=self.function,
            **self.options | changes,
        )  # fmt: skip

    def lines(self):
        """Number of train lines in the journal, including lines that a resume made void."""
        path = self.dir / "metrics.jsonl"
        return path.read_bytes().count(TRAIN_LINE) if path.exists() else 0

    def wait_for(self, what, ready, processes, seconds=120):
        """Wait for `ready()`: True if it holds, False if a process ends first. Raises TimeoutError after that."""
        deadline = time.monotonic() + seconds
        while not ready():
            if any(process.exitcode is not None for process in processes):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.dir}: no {what} in {seconds} s")
            time.sleep(0.002)
        return True

    def in_save(self):
        """True if a checkpoint is half written, which includes one whose writer was killed."""
        return bool(list(self.dir.glob("checkpoints/.step_*.tmp")))

    def ends_calmly(self, calm_hash):
        """Run to the end; returns the names of the checks that failed and the output, "" if all passed."""
        done = wait_for(self.start(), self.home, 600)
        checks = dict(exit_codes=done.codes == [0] * self.world)
        checks["sha256"] = checks["exit_codes"] and weights_hash(self.dir) == calm_hash
        expected = {e: list(range(NUM_PAIRS)) for e in range(1, self.options["epochs"] + 1)}
        checks["ids_once"] = ids_by_epoch(self.dir) == expected
        checks["no_drafts"] = not list(self.dir.rglob("*.tmp"))
        wrong = [name for name, right in checks.items() if not right]
        return f"{', '.join(wrong)}\n{done.text[-2000:]}" if wrong else ""


def add_kinds_of_runs(parser):
    """Add the options of a harness whose runs may capture steps or train an adapter."""
    parser.add_argument("--recorded", action="store_true", help="each step is recorded; needs GPUs")
    parser.add_argument("--lora_rank", type=int, default=0, help="above 0: the runs train an adapter")
    parser.add_argument("--base_precision", default="auto", help="of its base: auto, nf4")
    parser.add_argument("--family", default="t5", help="of its base: t5, trained here first; qwen, with random weights")


def kind_of_runs(given):
    """What add_kinds_of_runs' options say, in words; empty if they say nothing."""
    if given.recorded:
        return "captured steps"
    return f"an adapter, base_precision={given.base_precision}" if given.lora_rank else ""


def options_of_kind(home, given, model="shape.json"):
    """Options of a run of the kind that `given` says; an adapter's base is made here."""
    if given.recorded:
        (home / "wide.json").write_text(json.dumps(WIDE))
        return RECORDED
    if not given.lora_rank:
        return {}
    adapter = dict(lora_rank=given.lora_rank, lora_dropout=0.1, learn_rate=5e-3, base_precision=given.base_precision)
    adapter |= dict(finetune_from_ckp_file="base")
    if given.family == "qwen":
        tokenizer = load_tokenizer(home / "model_save" / "tokenizer")
        sizes = DecoderModelConfig(**QWEN_SIZES, vocab_size=tokenizer.vocab_size, initializer_range=0.2)
        export_model(DecoderModel(sizes).initialise(1), tokenizer, home / "base")
        return adapter | dict(model=None, dropout=None, max_seq_len=96, micro_batch_tokens=96)
    done = train(home, output_dir="base", model=model, epochs=1, seconds=600)
    assert done.codes == [0], done.text
    return adapter


def sleepy_main(words):
    """`main` with a sleep of SLEEP_SECONDS in each step."""
    fire = fault_injection.fire

    def slow_fire(site, step):
        if site == "reduce":
            time.sleep(SLEEP_SECONDS)
        return fire(site, step)

    fault_injection.fire = slow_fire
    return main(words)


def calm_hash(home, world, **options):
    """sha256 of the final weights of an undisturbed run with these options."""
    return _calm_hash(home, world, tuple(sorted((dict(dropout=0.1) | options).items())))


@functools.cache
def _calm_hash(home, world, options):
    name = f"calm{world}_{abs(hash(options)) % 10**8}"
    done = train(home, world, output_dir=name, seconds=3600, **dict(options))
    assert done.codes == [0] * world, done.text
    return weights_hash(home / name)


def typed(program):
    """Command line of this program without its --out option."""
    return re.sub(r" ?--out \S+", "", " ".join(["python", "-m", program, *sys.argv[1:]]))


def tell(file=None, **values):
    """Print `values` as a JSON line, and append it to `file` if one is given."""
    line = json.dumps(values)
    print(line, flush=True)
    if file:
        with open(file, "a") as out:
            out.write(line + "\n")


def hardware():
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} at the end, torch {torch.__version__}"


def write_section(name, title, header, rows, note="", path=FAULTS_PAGE):
    """Replace the table between the marks of `name` in bench/results/faults.md, or append one."""
    cells = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells)
    when = time.strftime("%Y-%m-%d")
    section = f"<!-- {name} -->\n## {title}\n\n{when}, {hardware()}. {note}\n\n{table}\n<!-- /{name} -->\n"
    text = Path(path).read_text() if Path(path).exists() else "# Faults\n\n"
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    after = rest.partition(f"<!-- /{name} -->\n")[2] if mark else ""
    Path(path).write_text(before + ("" if mark or before.endswith("\n\n") else "\n") + section + after)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def delete(path):
    path.unlink()


def fill(directory):
    """Fill the disk of `directory`; returns a function that frees it again."""
    ballast = directory.parent / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass
    return ballast.unlink


def mount(*words):
    """Run mount(8) and return its exit code, which is not 0 if mounting is not allowed."""
    return subprocess.run(["mount", *map(str, words)], check=False, capture_output=True).returncode
