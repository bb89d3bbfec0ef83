"""What preferences cost: DPO against fine-tuning on both responses of the same pairs, and against TRL's trainer.

    python -m bench.preferences --output_dir DIR [--parts small,qwen,trl] [--trl FOLDER]   on one GPU, about 10 minutes
    python -m bench.preferences --output_dir DIR --rehearse                                on the CPU, tiny networks

small: a T5 of the model small, whole, 128 pairs a step, lengths of short answers; qwen: a LoRA of rank 16 on the shape
of Qwen3-1.7B, bf16, random weights, 16 pairs a step, lengths up to 1,024 tokens. Each gives a JSON line for `sft` (both
responses of a pair as examples), for `dpo`, and for `repeated` (dpo, where a T5 reads a source once for each response):
seconds of a step, peak of the reserved memory, seconds for the reference of a step's pairs; then the ratios. Tokens are
those of the examples of `sft` in all of them. trl: TRL's DPOTrainer on the same pairs as `qwen`, PEFT's LoRA, its
reference without the adapter in each step; batches of 8, 4 and 2 pairs, with activation checkpointing and without, of
which the fastest counts. It needs trl (tried: 1.16), which --trl names where it is installed apart.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.children import Job, gpu_slots, run_jobs
from bench.one_step import Setting
from bench.preference_pairs import RANK, TIMED, WARM, Store, lengths_of, model_config_of, now
from bench.preference_trl import time_trl
from bench.runs import schedule_of
from model.commands.machine import launch_tokens_here
from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.commands.setup import set_memory_limit
from model.memory.estimate import Estimate
from model.memory.plan import choose_plan
from model.nn.registry import family_of
from model.runtime.device_memory import peak_memory, reset_peak
from model.runtime.distributed import Ranks
from model.train.derive import with_zeros
from model.train.dry_run import dry_run_update
from model.train.evaluate import EPOCH, evaluating
from model.train.examples import Examples
from model.train.loader import Loader
from model.train.objectives.dialogues import Dialogues
from model.train.objectives.pairs import Pairs
from model.train.objectives.preference_dialogues import DialogueForm
from model.train.objectives.preference_losses import PreferenceLoss
from model.train.objectives.preference_pairs import PairForm
from model.train.objectives.preferences import Preferences
from model.train.optim import make_optimizer
from model.train.step import Position, StepContext, train_steps
from tests.parts import make_spec

RECORDING, JOB_SECONDS = 24, 500  # steps: each size is captured when it comes first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--parts", default="small,qwen,trl")
    parser.add_argument("--trl", default="")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, _, name = options.one.partition("/")
        trained = time_trl(options) if part == "trl" else Run(part, name, options.rehearse).measure()
        for values in trained:
            print(json.dumps(dict(part=part, name=name) | values), flush=True)
        return
    folder = Path(options.output_dir).resolve()
    names = dict(small=("sft", "dpo", "repeated"), qwen=("sft", "dpo"), trl=("dpo",))
    words = [sys.executable, "-m", "bench.preferences", "--output_dir", folder, "--trl", options.trl]
    words += ["--rehearse"] * options.rehearse
    jobs = [
        Job(f"{part}/{name}", [*words, "--one", f"{part}/{name}"], JOB_SECONDS)
        for part in options.parts.split(",") for name in names[part]
    ]  # fmt: skip
    results = []
    for done in run_jobs(jobs, folder / "logs", gpu_slots(0 if options.rehearse else 1)):
        found = [json.loads(line) for line in done.text.splitlines() if line.startswith('{"part"')]
        results += found + ([dict(job=done.job.name, problem=done.problem)] if done.problem else [])
    lines = "".join(json.dumps(result) + "\n" for result in [*results, *ratios(results)])
    (folder / "results.jsonl").write_text(lines)
    print(lines, end="")


def ratios(results):
    """Time and memory of dpo over those of sft, for each part, and our tokens a second over TRL's best."""
    known = {}
    for values in results:
        if values.get("tokens_per_second"):
            key = values["part"], values["name"]
            known[key] = max(known.get(key, values), values, key=lambda each: each["tokens_per_second"])
    found = []
    for (part, name), own in known.items():
        if name != "sft" and part != "trl" and (base := known.get((part, "sft"))):
            seconds = own["step_seconds"] / base["step_seconds"]
            with_reference = (own["step_seconds"] + own["reference_seconds"]) / base["step_seconds"]
            memory = own["reserved_bytes"] / base["reserved_bytes"] if base["reserved_bytes"] else None
            found.append(dict(ratio=f"{part}: {name} over sft", time=round(seconds, 3), memory=memory,
                              time_with_reference_of_one_epoch=round(with_reference, 3)))  # fmt: skip
    if ours := known.get(("qwen", "dpo")):
        for theirs in (values for (part, _), values in known.items() if part == "trl"):
            seconds = ours["step_seconds"] + ours["reference_seconds"]
            speed = ours["step_tokens"] / seconds / theirs["tokens_per_second"]
            found.append(dict(ratio="qwen: ours over trl, one epoch with its reference", speed=round(speed, 2)))
    return found


@dataclass(frozen=True)
class Run:
    """One measurement."""

    part: str
    name: str
    rehearse: bool

    @property
    def config(self):
        own = dict(
            bleu_pairs=0, warmup_steps=0, objective="pairs" if self.name == "sft" else "dpo", any_learn_rate=True
        )
        own |= dict(lora_rank=RANK) if self.part == "qwen" else dict(optimizer="adamw")
        return load_config("pretrain", own)

    @property
    def model_config(self):
        return model_config_of(self.part, self.rehearse)

    def store(self, steps):
        """(Store, Objective) of the pairs of so many steps, or of both responses of each as examples."""
        lengths, is_decoder = lengths_of(self.part, steps, self.rehearse), self.part == "qwen"
        one, turns = np.ones(len(lengths), np.int64), int(is_decoder)
        if self.name == "sft":
            rows = np.concatenate([lengths[:, [0, 1]], lengths[:, [0, 2]]])
            order = np.arange(len(rows)).reshape(2, -1).T.ravel()  # both of a pair are neighbours
            rows = np.column_stack([rows, np.ones((len(rows), turns), np.int64)])[order]
            store = Store(rows, self.model_config.vocab_size, dict(target_tokens=rows[:, 1].astype(np.float32)), turns)
            return store, Dialogues("", 1024) if is_decoder else Pairs()
        rows = np.column_stack([lengths, one, one]) if is_decoder else lengths
        form = DialogueForm("") if is_decoder else PairForm(shares_source=self.name != "repeated")
        objective = Preferences(form, PreferenceLoss("sigmoid", 0.1))
        return Store(rows, self.model_config.vocab_size, {}, 2 * turns), objective

    def measure(self):
        """Yield the figures of `train_steps`, cut as the plan cuts a step."""
        setting = Setting(self.config, self.model_config, self.rehearse, 1, 1)
        warm, timed = (1, 2) if self.rehearse else (RECORDING + WARM, TIMED)
        store, objective = self.store(warm + timed)
        step, kernels = -(-len(store) // (warm + timed)), not self.rehearse
        _, usable = set_memory_limit(setting.device, 0.0)
        spec = make_spec(self.config, self.model_config, setting.dtype, setting.device.type, launch_tokens_here())
        examples = Examples(store, objective, family_of(self.model_config), 0, self.config.seed, kernels)
        examples = _with_zeros(examples)
        plan = choose_plan(plan_options(self.config), Estimate(spec, examples.histogram, step), usable, None)
        model, ranks = setting.model(), Ranks(0, 1, 0, setting.device, "none", None)
        optimizer = make_optimizer(model, self.config)
        dry_run_update(ranks, model, optimizer)
        loader = Loader(ranks, examples, schedule_of(self.config, len(store), step))
        context = StepContext(ranks, model, optimizer, loader, self.config)
        reset_peak(setting.device)
        tokens = started = 0
        for number, result in enumerate(train_steps(context, Position(plan))):
            tokens += result.tokens if number >= warm else 0
            started = now(setting.device) if number == warm - 1 else started
        seconds = (now(setting.device) - started) / timed
        own = lengths_of(self.part, warm + timed, self.rehearse)
        step_tokens = float((2 * own[:, 0] + own[:, 1] + own[:, 2]).sum()) / (warm + timed)  # as sft has them
        yield dict(
            step_seconds=seconds, tokens_per_second=step_tokens / seconds, step_tokens=step_tokens,
            read_tokens=tokens / timed, reserved_bytes=peak_memory(setting.device)[1] or 0,
            micro_batch_tokens=plan.micro_batch_tokens, recomputed_blocks=plan.gradient_checkpointing,
            recorded=plan.graphs, predicted_bytes=plan.predicted_peak_bytes,
            reference_seconds=self._reference_seconds(model, examples, plan, step, setting.device),
        )  # fmt: skip

    def _reference_seconds(self, model, examples, plan, step, device):
        """Seconds for the reference of a step's pairs; 0 for an objective without one."""
        if not examples.objective.derived:
            return 0.0
        from model.data.packing import cut

        count, started = min(4 * step, len(examples)), 0.0
        with evaluating(model):
            for again in (False, True):
                started = now(device) if again else started
                for ids in cut(np.arange(count), examples.lengths(np.arange(count), EPOCH), plan.micro_batch_tokens):
                    batch = examples.batch(ids, EPOCH).to(device)
                    examples.objective.derive(model, batch, plan.chunk_tokens)
        return (now(device) - started) * step / count


def _with_zeros(examples):
    return with_zeros(examples) if examples.objective.derived else examples


if __name__ == "__main__":
    sys.exit(main())
