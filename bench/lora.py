"""Speed and peak memory of T5's variants and of an adapter, by bench.step_profile, and their share of small's FLOP/s.

    python -m bench.lora --output_dir DIR                 on one GPU
    python -m bench.lora --output_dir DIR --rehearse      on the CPU, with tiny models

Writes a corpus with ChatLM's lengths, the shapes and a base to DIR/corpus; each cell is a step_profile on it, alone.
Prints one JSON line a result and appends it to DIR/results.jsonl; the last line holds the ratios; DIR/logs has the
kernels of each cell. Predicted against measured memory: python -m bench.memory_fit --part adapters.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from bench.children import Job, gpu_slots, run_jobs
from bench.corpus import draw_lengths, write_corpus
from config import MODELS
from model.data.tokenizer import load_tokenizer
from model.formats.weights import export_model
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig

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
    options = parser.parse_args()
    folder = Path(options.output_dir).resolve()
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
    jobs = [Job(name, words_of(name, folder, rehearse), CELL_SECONDS) for name in names]
    results = []
    for done in run_jobs(jobs, folder / "logs", gpu_slots(0 if rehearse else torch.cuda.device_count())):
        found = [json.loads(line) for line in done.text.splitlines() if line.startswith('{"bench"')]
        figures = dict(problem=done.problem) if done.problem else found[0] | flops_of(done.job.name, found[0], rehearse)
        results.append(tell(folder, dict(part="speed", cell=done.job.name) | figures))
    return results


def words_of(name, folder, rehearse):
    """The command line of a cell."""
    shape, pairs, rank = CELLS[name]
    words = [sys.executable, "-m", "bench.step_profile", "--corpus", folder / "corpus", "--models", f"{shape}.json"]
    words += ["--pairs", 8 if rehearse else pairs, "--seconds", 1 if rehearse else 10]
    words += ["--warm_steps", 2, "--profiled_steps", 1] if rehearse else []
    return [*words, *["--finetune_from_ckp_file=base", f"--lora_rank={rank}"] * bool(rank)]


def flops_of(name, figures, rehearse):
    """{flops: a second of a cell}, of its tokens a second and the mean length of a pair."""
    shape, _, rank = CELLS[name]
    prompt, target = draw_lengths(100_000, np.random.default_rng(0)).mean(axis=0)
    pairs_per_second = figures["tokens_per_second"] / (prompt + target)
    sizes = T5ModelConfig(**shape_of(shape, rehearse))
    return dict(flops=pairs_per_second * flops_per_pair(sizes, rank, prompt, target))


def flops_per_pair(c, rank, prompt, target):
    """FLOPs of the matrix products that a pair of such lengths needs; attention scores and recomputation left out.

    A trained matrix costs 6 a number and token: forward, gradient of the input, gradient of the matrix. A frozen one 4.
    """
    inner, kept = c.num_heads * c.d_kv, 4 if rank else 6

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
        found["LoRA's peak over Muon's"] = round(adapter["peak_gib"] / max(full["peak_gib"], 1e-9), 3)
    return found


if __name__ == "__main__":
    sys.exit(main())
