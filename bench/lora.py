"""Measure the speed of T5's variants and adapters, their share of small's FLOP/s, and their peak memory.

    python -m bench.lora --output_dir DIR                 on one GPU
    python -m bench.lora --output_dir DIR --rehearse      on the CPU, with tiny models

Each cell is `train_steps` as train_low_mem.py runs it, in a process of its own, on pairs with ChatLM's lengths. Its
`predicted_gib` is for the steps that a cell runs; `planned_gib` is the plan's, for the costliest that might come.
Prints one JSON line a result and appends it to DIR/results.jsonl; the last line holds the ratios. The error of the
prediction: python -m bench.memory_fit --part adapters.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_low_mem.py sets them
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch

from bench.children import Job, gpu_slots, run_jobs
from bench.clock import Pace, StepClock
from bench.corpus import draw_lengths, write_corpus
from bench.runs import prepare
from config import MODELS
from model.data.buckets import buckets_for
from model.data.tokenizer import load_tokenizer
from model.formats.weights import export_model
from model.memory.estimate import Estimate
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.device_memory import peak_memory, reset_peak
from model.runtime.distributed import start_ranks
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
CORPUS_PAIRS, CELL_SECONDS = 51_200, 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--skip", default="", help="leave out cells whose name contains one of these words")
    parser.add_argument("--cell", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = Path(options.output_dir).resolve()
    if options.cell:
        return time_cell(options.cell, folder, options.rehearse)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in CELLS if not any(word and word in name for word in options.skip.split(","))]
    tell(folder, summary(measure_speed(names, folder, options.rehearse)))


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
        model=f"{shape}.json", batch_size_per_gpu=8 if rehearse else pairs, bleu_pairs=0, output_dir=f"run_{name}"
    )  # fmt: skip
    ranks = start_ranks()
    run, plan = prepare(ranks, options | (dict(finetune_from_ckp_file="base", lora_rank=rank) if rank else {}))
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
    lengths = run.train.histogram
    estimate = Estimate(run.recipe.spec, lengths, pairs, run.recipe.answers)
    if not plan.graphs:
        return estimate.step_peak(*plan.batching)
    tokens = max(bucket.tokens for bucket in buckets_for(lengths.tokens, pairs, lengths.counts))
    return estimate.step_peak(tokens, *plan.batching[1:])


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


def summary(results):
    """The ratios between cells."""
    cells = {result["cell"]: result for result in results if not result.get("problem")}
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
    return found


if __name__ == "__main__":
    sys.exit(main())
