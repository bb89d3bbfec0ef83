"""Seconds to generate answers: the project's decoder, and transformers' generate on the same weights.

    python -m bench.generation [--models small,chatlm] [--counts 1,32,100] [--tokens 128] [--stock 100] [--profile]

Random weights, prompts of 8 to 64 random tokens, every answer forced to `--tokens` tokens, greedy. `cold` is the first
call, capture included, `warm` the best of three more. A JSON line for each case.
"""

import argparse
import json
import platform
import time
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import torch

from bench.corpus import VOCAB_SIZE
from config import MODELS
from model.generate.engine import Limits, generate
from model.generate.sampling import GREEDY, Sampling
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from tests.stock import as_hugging_face

SAMPLED = Sampling(temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=1)


def main():
    parser = argparse.ArgumentParser(description="Seconds to generate answers.")
    parser.add_argument("--models", default="small,chatlm")
    parser.add_argument("--counts", default="1,32,100")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=2048, help="answers generated together, at most")
    parser.add_argument("--profile", action="store_true", help="tell the kernels of a warm call too")
    parser.add_argument("--stock", default="", help="counts for which transformers' generate is timed too")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    print(json.dumps(dict(device=name, torch=torch.__version__, threads=torch.get_num_threads())), flush=True)
    for model_name in options.models.split(","):
        model = make_model(model_name, device)
        for count in map(int, options.counts.split(",")):
            report(model_name, count, options, model)
        if options.stock:
            report_stock(model_name, options, model)


def report(model_name, count, options, model):
    inputs = prompts(count)
    limits = Limits(min(count, options.slots), max(map(len, inputs)), options.tokens, 0, -1)
    for kind, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        times = seconds_of(lambda s=sampling: generate(model, inputs, limits, options.tokens, s))
        print(json.dumps(dict(model=model_name, kind=kind, count=count) | times), flush=True)
        if options.profile:
            report_profile(lambda s=sampling: generate(model, inputs, limits, options.tokens, s))


def report_profile(work, rows=28):
    """Print what `work()` takes longest for, kernels or a CPU's operators: microseconds in all, calls, name."""
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    time_of = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    for event in sorted(profile.key_averages(), key=time_of, reverse=True)[:rows]:
        print(f"{time_of(event):10.0f} us {event.count:7d} {event.key[:110]}", flush=True)


def make_model(name, device):
    config = T5ModelConfig(**MODELS[name], vocab_size=VOCAB_SIZE)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return TextToTextModel(config, compute_dtype=dtype).initialise(0).to(device)


def prompts(count):
    draw = np.random.default_rng(0)
    return [draw.integers(300, VOCAB_SIZE, draw.integers(8, 65)) for _ in range(count)]


def report_stock(model_name, options, model):
    special = SimpleNamespace(pad_id=0, eos_id=1)
    stock = as_hugging_face(model, special).to(model.device, model.compute_dtype)
    for count in map(int, options.stock.split(",")):
        times = seconds_of(lambda n=count: stock_generate(stock, prompts(n), options.tokens))
        print(json.dumps(dict(model=model_name, kind="transformers", count=count) | times), flush=True)


def stock_generate(stock, inputs, tokens):
    ids = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(inputs):
        ids[row, : len(own)], mask[row, : len(own)] = torch.as_tensor(own), 1
    ids, mask = ids.to(stock.device), mask.to(stock.device)
    stock.generate(ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)


def seconds_of(work, repeats=3):
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return dict(cold=round(times[0], 4), warm=round(min(times[1:]), 4))


if __name__ == "__main__":
    main()
