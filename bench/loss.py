"""Compare linear_cross_entropy with the plain compiled loss: time and peak memory of forward + backward.

    python -m bench.loss [--tokens 32768] [--width 512] [--vocab 29298]

Prints one JSON line per loss, those with a teacher and against loops too; the last line has the ratios of the first
two. bf16 on a GPU, float32 on a CPU.
"""

import argparse
import json
from functools import partial

import torch
import torch.nn.functional as F

from bench.clock import memory_of_call, time_call
from config import CHOICES
from model.nn.flat_params import FlatParams, with_padding
from model.nn.guides import NO_GUIDES, Guides, TeacherOutput
from model.nn.loss import linear_cross_entropy
from model.nn.loss_terms import PLAIN, LossTerms

ANSWER_TOKENS = 80


def main():
    parser = argparse.ArgumentParser(description="Compare the chunked loss with the plain compiled one.")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=29_298)
    options = parser.parse_args()
    results = compare(options.tokens, options.width, options.vocab)
    for name, result in results.items():
        print(json.dumps(dict(part="loss", name=name, **result)), flush=True)
    ours, plain = results["linear_cross_entropy"], results["plain, compiled"]
    ratios = dict(time=ours["ms"] / plain["ms"], memory=ours["peak_mib"] / max(plain["peak_mib"], 1e-9))
    print(json.dumps(dict(part="loss", name="ours over plain", **ratios)))


def plain_loss(hidden, weight, labels):
    """Cross-entropy summed over tokens, with all logits in memory."""
    return F.cross_entropy(F.linear(hidden, weight.to(hidden.dtype)).float(), labels, reduction="sum")


def compare(tokens, width, vocab):
    """{loss: dict(ms, peak_mib, loss)} of both losses on the same inputs."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).mul(width**-0.5).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocab, width, device=device))
    flat = FlatParams([weight], [], [weight], dtype)  # like the model's: a copy in bf16 with padded rows
    labels = torch.randint(vocab, (tokens,), device=device)

    def ours(hidden, weight, labels, terms=PLAIN, guides=NO_GUIDES):
        flat.refresh()
        copy = with_padding(weight.copy)
        return linear_cross_entropy(hidden, weight, labels, terms=terms, copy_WD=copy, guides=guides)[0]

    ways = {"linear_cross_entropy": ours, "plain, compiled": torch.compile(plain_loss, dynamic=False)}
    teacher = TeacherOutput(torch.randn_like(hidden).detach(), with_padding(weight.copy), vocab)
    places = torch.arange(tokens, device=device) % ANSWER_TOKENS
    ways["with a teacher"] = partial(ours, terms=LossTerms(distill_weight=0.5), guides=Guides((teacher,)))
    for kind in CHOICES["against_loops"][1:]:
        terms = LossTerms(against_loops=kind, loops_weight=1.0)
        ways[kind] = partial(ours, terms=terms, guides=Guides(places_N=places))
    return {name: measure(way, hidden, weight, labels, device) for name, way in ways.items()}


def measure(way, hidden, weight, labels, device):
    def call():
        hidden.grad = weight.grad = None
        loss = way(hidden, weight, labels)
        loss.backward()
        return loss.detach()

    loss = call().item() / len(labels)  # compiles at the first call
    call()
    hidden.grad = weight.grad = None
    peak = memory_of_call(call, device)
    return dict(ms=time_call(call, device, seconds=1), peak_mib=peak / 2**20, loss=loss)


if __name__ == "__main__":
    main()
