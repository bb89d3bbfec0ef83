"""Measure T5's variants and adapters: speed, share of small's FLOP/s, peak memory, and the error of the plan.

    python -m bench.lora --output_dir DIR                 on one GPU, about 9 minutes
    python -m bench.lora --output_dir DIR --part speed    or memory: one of the two parts
    python -m bench.lora --output_dir DIR --rehearse      on the CPU, with tiny models

speed: each cell is `train_steps` as train_low_mem.py runs it, in a process of its own, on pairs with ChatLM's lengths.
Its `predicted_gib` is for the steps that a cell runs; `planned_gib` is the plan's, for the costliest that might come.
memory: one step of each of 24 cases in one forward; the error is that of the prediction, made as the plan makes it.
Both print one JSON line a result and append it to DIR/results.jsonl; the last line holds the ratios and errors.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_low_mem.py sets them
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch

from bench.children import Job, gpu_slots, run_jobs
from bench.clock import Pace, StepClock
from bench.corpus import draw_lengths, write_corpus
from bench.memory_fit import CHUNK_TOKENS, OneLength
from bench.runs import context_of, schedule_of
from config import MODELS, TrainConfig, load_config
from model.commands.recipe import estimate_for, lora_of, memory_spec
from model.commands.setup import prepare_run
from model.data.buckets import buckets_for
from model.data.length_histogram import Lengths
from model.data.tokenizer import load_tokenizer
from model.formats.weights import export_model
from model.memory.estimate import Estimate
from model.memory.plan import MemoryPlan
from model.nn.lora import attach
from model.nn.registry import family_of
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.device_memory import peak_memory, release_memory, reset_peak
from model.runtime.distributed import Ranks, start_ranks
from model.train.dry_run import dry_run_update
from model.train.optim import make_optimizer
from model.train.step import Position, train_steps

GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, scale_decoder_outputs=False)
V11_SMALL = dict(d_model=512, d_ff=1024, num_heads=6, d_kv=64, num_layers=8, num_decoder_layers=8) | GATED
SHAPES = {
    "small": MODELS["small"] | dict(vocab_size=29_298),
    "chatlm": MODELS["chatlm"] | dict(vocab_size=29_298),
    "v1.1-small": V11_SMALL | dict(vocab_size=32_128),
    "mt5-small": V11_SMALL | dict(vocab_size=250_112, model_type="mt5"),
}
TINY = dict(d_model=64, d_ff=128, num_heads=2, d_kv=32, num_layers=1, num_decoder_layers=1)
RANK = 16
CELLS = {  # name: (shape, pairs, rank)
    "small": ("small", 256, 0),
    "v1.1-small": ("v1.1-small", 256, 0),
    "mt5-small": ("mt5-small", 256, 0),
    "chatlm": ("chatlm", 64, 0),
    "chatlm, LoRA": ("chatlm", 64, RANK),
}
CASES = [
    (shape, rank, checkpointing, pairs, tokens)
    for shape, rank in (("v1.1-small", 0), ("mt5-small", 0), ("chatlm", RANK))
    for checkpointing in (False, True)
    for pairs, tokens in ((32, 128), (128, 64), (128, 192), (256, 192))
]
CORPUS_PAIRS, CELL_SECONDS = 51_200, 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--part", default="speed,memory")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--skip", default="", help="leave out cells whose name contains one of these words")
    parser.add_argument("--cell", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = Path(options.output_dir).resolve()
    if options.cell:
        return time_cell(options.cell, folder, options.rehearse)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in CELLS if not any(word and word in name for word in options.skip.split(","))]
    results = measure_speed(names, folder, options.rehearse) if "speed" in options.part else []
    if "memory" in options.part:
        results += [tell(folder, measure_case(case, options.rehearse)) for case in CASES]
    tell(folder, summary(results))


def tell(folder, result):
    print(json.dumps(result), flush=True)
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    return result


def shape_of(name, rehearse):
    """Fields of the model configuration `name`; tiny in a rehearsal, with a vocabulary of its own size."""
    return SHAPES[name] | (TINY if rehearse else {})


def measure_speed(names, folder, rehearse):
    """The figures of these CELLS, one at a time on each GPU."""
    write_corpus(folder / "corpus", 600 if rehearse else CORPUS_PAIRS)
    for name in SHAPES:
        (folder / "corpus" / f"{name}.json").write_text(json.dumps(shape_of(name, rehearse)))
    base = TextToTextModel(T5ModelConfig(**shape_of("chatlm", rehearse))).initialise(1)
    export_model(base, load_tokenizer(folder / "corpus" / "tokenizer"), folder / "corpus" / "base")
    more = ["--output_dir", folder, *["--rehearse"] * rehearse]
    jobs = [Job(name, [sys.executable, "-m", "bench.lora", *more, "--cell", name], CELL_SECONDS) for name in names]
    results = []
    for done in run_jobs(jobs, folder / "logs", gpu_slots(0 if rehearse else torch.cuda.device_count())):
        figures = dict(problem=done.problem) if done.problem else json.loads(done.text.splitlines()[-1])
        results.append(tell(folder, dict(part="speed", cell=done.job.name) | figures))
    return results


def time_cell(name, folder, rehearse):
    """Time a cell in this process and print its figures as the last line."""
    shape, pairs, rank = CELLS[name]
    os.chdir(folder / "corpus")
    options = dict(
        model=f"{shape}.json", batch_size_per_gpu=8 if rehearse else pairs, gradient_accumulation_steps=1, bleu_pairs=0,
        tokenizer_dir="tokenizer", train_file="train.parquet", validation_file="valid.parquet", epochs=1000,
        output_dir=f"run_{name}",
    )  # fmt: skip
    if rank:
        options |= dict(finetune_from_ckp_file="base", lora_rank=rank)
        del options["model"], options["tokenizer_dir"]
    config = load_config("pretrain", options)
    ranks = start_ranks(config.backend, config.ddp_timeout_s)
    run, _, plan = prepare_run(ranks, config, set(options), resumed=False)
    reset_peak(ranks.device)  # leaves out the peak of the memory probes
    pace = Pace(2, 0, 1) if rehearse else Pace(12, 4, 10)
    clock = StepClock(ranks.device, pace, forgets_peak=False)
    for result in train_steps(run.context, Position(plan)):
        if clock.tick(len(result.ids), result.tokens):
            break
    figures = clock.result()
    flops = figures["pairs_per_second"] * flops_per_pair(run.model.config, run.model.lora)
    predicted, planned = predicted_bytes(run, plan, pairs), run.memory["phases"]["step"]["predicted"]
    sizes = dict(reserved=peak_memory(ranks.device)[1], predicted=predicted, planned=planned)
    figures |= {f"{name}_gib": size / 2**30 for name, size in sizes.items()}
    print(json.dumps(figures | dict(flops=flops)), flush=True)
    os._exit(0)


def predicted_bytes(run, plan, pairs):
    """Predicted peak of the reserved bytes of steps that fit the buckets."""
    model, lengths = run.model, run.train.histogram
    estimate = estimate_for(run.ranks, run.config, model.config, model.compute_dtype, lengths, pairs)
    if not plan.graphs:
        return estimate.step_peak(*plan.cutting)
    tokens = max(bucket.tokens for bucket in buckets_for(lengths.tokens, pairs, lengths.counts))
    return estimate.step_peak(tokens, *plan.cutting[1:])


def flops_per_pair(c, lora):
    """FLOPs of the matrix products that a pair of ChatLM's lengths needs; attention scores and recomputation left out.

    A trained matrix costs 6 a number and token: forward, gradient of the input, gradient of the matrix. A frozen one 4.
    """
    prompt, target = draw_lengths(100_000, np.random.default_rng(0)).mean(axis=0)
    inner, kept = c.num_heads * c.d_kv, 4 if lora else 6
    rank = lora.rank if lora else 0

    def product(num_in, num_out):
        return kept * num_in * num_out + 6 * rank * (num_in + num_out)

    attention = product(c.d_model, inner), product(inner, c.d_model)
    feed_forward = (2 if c.is_gated else 1) * product(c.d_model, c.d_ff) + product(c.d_ff, c.d_model)
    encoder = c.num_layers * (3 * attention[0] + attention[1] + feed_forward)
    decoder = c.num_decoder_layers * (4 * attention[0] + 2 * attention[1] + feed_forward)
    cross = c.num_decoder_layers * 2 * attention[0]
    return prompt * (encoder + cross) + target * (decoder + kept * c.d_model * c.vocab_size)


def measure_case(case, rehearse):
    """Predicted and measured peak of the reserved bytes in one step of a case."""
    shape, rank, checkpointing, pairs, tokens = case
    pairs, tokens = (2, 16) if rehearse else (pairs, tokens)
    model_config = T5ModelConfig(**shape_of(shape, rehearse))
    config = load_config("pretrain", dict(warmup_steps=0, bleu_pairs=0) | (dict(lora_rank=rank) if rank else {}))
    setting = Setting(config, model_config, rehearse, pairs, tokens)
    plan = MemoryPlan(2 * pairs * tokens, CHUNK_TOKENS, checkpointing * model_config.num_blocks, 0)
    predicted = setting.estimate.peaks(*plan.cutting)["step"]
    values = dict(shape=shape, rank=rank, checkpointing=checkpointing, pairs=pairs, tokens=tokens)
    return dict(part="memory", **values) | errors(predicted, setting.run(plan)[0])


def errors(predicted, measured):
    error = round(predicted / measured - 1, 4) if measured else None
    gib = round(measured / 2**30, 2) if measured else None
    return dict(predicted_bytes=predicted, measured_bytes=measured, measured_gib=gib, error=error)


@dataclass(frozen=True)
class Setting:
    """A network with random weights, and pairs of one length that it is trained on."""

    config: TrainConfig
    model_config: object
    rehearse: bool
    pairs: int
    tokens: int  # of each side

    @property
    def device(self):
        return torch.device("cpu" if self.rehearse else "cuda:0")

    @property
    def dtype(self):
        return torch.float32 if self.rehearse else torch.bfloat16

    @property
    def estimate(self):
        spec = memory_spec(self.config, self.model_config, self.dtype, self.device.type)
        lengths = Lengths(np.array([[self.tokens, self.tokens]]), np.array([self.pairs]))
        return Estimate(spec, lengths, self.pairs)

    def model(self):
        with torch.device("meta"):
            model = family_of(self.model_config).build(self.model_config, 0.0, self.dtype)
            if lora := lora_of(self.config, self.model_config):
                attach(model, lora)
        model.place(self.device)
        for flat in model.flat.weights:
            flat.normal_(std=0.02) if flat.is_floating_point() else flat.random_(0, 256)
        return model

    def run(self, plan, steps=1):
        """(peak reserved bytes, seconds of a step); the bytes are 0 on a CPU, None if a step did not fit."""
        release_memory()
        gc.collect()
        model, pairs = self.model(), self.pairs
        ranks, store = Ranks(0, 1, 0, self.device, "none", None), OneLength(pairs, self.tokens, model.config.vocab_size)
        optimizer, schedule = make_optimizer(model, self.config), schedule_of(self.config, steps * pairs, pairs)
        dry_run_update(ranks, model, optimizer)
        release_memory()
        reset_peak(self.device)
        context, fits, started = context_of(ranks, model, optimizer, store, self.config, schedule), True, time.time()
        for result in train_steps(context, Position(plan)):
            fits = (
                fits
                and not result.events
                and result.micro_batches == -(-2 * pairs * self.tokens // plan.micro_batch_tokens)
            )
        if not self.rehearse:
            torch.cuda.synchronize(self.device)
        return peak_memory(self.device)[1] if fits else None, (time.time() - started) / steps


def summary(results):
    """The ratios that the two parts are about."""
    cells = {result["cell"]: result for result in results if result["part"] == "speed" and not result.get("problem")}
    found = dict(part="summary")
    if "small" in cells:
        found["share of small's FLOP/s"] = {
            name: round(cells[name]["flops"] / cells["small"]["flops"], 3)
            for name in ("v1.1-small", "mt5-small") if name in cells
        }  # fmt: skip
    if {"chatlm", "chatlm, LoRA"} <= cells.keys():
        full, adapter = cells["chatlm"], cells["chatlm, LoRA"]
        found["LoRA's speed over Muon's"] = round(adapter["tokens_per_second"] / full["tokens_per_second"], 3)
        for name in ("peak_gib", "reserved_gib"):
            found[f"LoRA's {name} over Muon's"] = round(adapter[name] / max(full[name], 1e-9), 3)
    sizes = np.abs(
        [result["error"] for result in results if result["part"] == "memory" and result["error"] is not None]
    )
    if len(sizes):
        found |= dict(cases=len(sizes), median=round(float(np.median(sizes)), 4))
        found["percentile_95"] = round(float(np.percentile(sizes, 95)), 4)
    return found


if __name__ == "__main__":
    sys.exit(main())
