"""Losses of a decoder of 0.4 B weights on real text by how masters and state are held, two seeds.

    python -m bench.master_dtype --train_file TEXT --validation_file TEXT --tokenizer_dir DIR --output_dir DIR
        [--steps 500] [--arms float32,host,bf16,naive,unshared,shared]       on two GPUs, about 5 minutes
    python -m bench.master_dtype … --rehearse              on CPU processes, a tiny network

AdamW, 8 texts of 1,024 tokens a step. `float32` masters; the same on the `host`; `bf16` masters, rounded at random;
`naive` ones, rounded to the nearest; two processes that have whole states (`unshared`), or parts of one (`shared`).
Prints a JSON line for each run with the validation loss at its end, then for each arm the mean of its seeds and how far
that is, in percent, from that of float32 masters.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from bench.children import ROOT, Job, gpu_slots, run_jobs
from model.run.journal import read_journal

SIZES = dict(
    family="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
ARMS = {  # name: (processes, options)
    "float32": (1, []),
    "host": (1, ["--offload=optimizer"]),
    "bf16": (1, ["--master_dtype=bf16", "--mixed_precision=bf16"]),
    "naive": (1, ["--master_dtype=bf16", "--mixed_precision=bf16"]),
    "unshared": (2, ["--share_state=False"]),
    "shared": (2, ["--share_state=True"]),
}
SEEDS, SECONDS = (1, 2), 200
NEAREST = """
import sys
sys.path.insert(0, {root!r})
from model.nn import bf16_gradients
from model.train import adamw, host_adamw
def to_nearest(out, values, *_):
    out.copy_(values)
for module in (bf16_gradients, adamw, host_adamw):
    module.round_to = to_nearest
from train_low_mem import main
sys.exit(main(sys.argv[1:]))
"""


def main():
    given = arguments()
    folder = Path(given.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sizes.json").write_text(json.dumps(SIZES | (TINY if given.rehearse else {})))
    (folder / "naive.py").write_text(NEAREST.format(root=str(ROOT)))
    arms, num_gpus = given.arms.split(","), 0 if given.rehearse else torch.cuda.device_count()
    losses = {name: [] for name in arms}
    for processes, slots in ((1, gpu_slots(num_gpus)), (2, [{}])):
        jobs = [job_of(folder, name, seed, given) for name in arms for seed in SEEDS if ARMS[name][0] == processes]
        for done in run_jobs(jobs, folder / "logs", slots):
            name, seed = done.job.name.split("-")
            loss = None if done.problem else end_loss(folder / done.job.name)
            wrong = done.problem and f"{done.problem}: {done.text[-600:]}"
            values = dict(arm=name, seed=int(seed), loss=loss, seconds=round(done.seconds, 1), wrong=wrong)
            print(json.dumps(values), flush=True)
            losses[name] += [loss] * (loss is not None)
    means = {name: statistics.mean(found) for name, found in losses.items() if len(found) == len(SEEDS)}
    for name, mean in means.items():
        away = 100 * (mean / means["float32"] - 1) if "float32" in means else None
        print(json.dumps(dict(arm=name, mean=round(mean, 4), percent=away and round(away, 3))))
    return len(means) < len(arms)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("train_file", "validation_file", "tokenizer_dir", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


def job_of(folder, name, seed, given):
    """The Job of a run."""
    (processes, options), run_dir = ARMS[name], f"{name}-{seed}"
    program = [folder / "naive.py"] if name == "naive" else [ROOT / "train_low_mem.py"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    length, texts = (48, 2) if given.rehearse else (1024, 8)
    words = [sys.executable, *launcher, *program, "train", f"--output_dir={folder / run_dir}", "--objective=text"]
    words += [f"--{key}={Path(getattr(given, key)).resolve()}" for key in ("train_file", "validation_file")]
    words += [f"--tokenizer_dir={Path(given.tokenizer_dir).resolve()}", f"--model={folder / 'sizes.json'}"]
    words += ["--optimizer=adamw", "--learn_rate=0.0006", f"--max_seq_len={length}", f"--global_batch_size={texts}"]
    words += [f"--max_steps={given.steps}", f"--seed={seed}", "--logging_steps=50", "--screen=off", "--plots=False"]
    words += ["--bleu_pairs=0", "--save_steps=1000000", "--save_seconds=1000000", "--overwrite=True", *options]
    env = dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1") if given.rehearse else {}
    return Job(run_dir, words, SECONDS, env, folder)


def end_loss(run_dir):
    """The last validation loss of a run."""
    return [line["loss"] for line in read_journal(run_dir / "metrics.jsonl") if line["kind"] == "eval"][-1]


if __name__ == "__main__":
    sys.exit(main())
