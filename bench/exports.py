"""Tokens a second on a CPU: transformers in float32 beside CTranslate2 in int8, and how often their answers are equal.

python -m bench.exports [MODEL_DIR] [--prompts FILE] [--num_prompts 64] [--threads 1] [--new_tokens 64]

Greedy answers; several at once are sorted by length, so that the padding costs little. Without MODEL_DIR: the model
`small` with random weights, which shows the speed alone.
"""

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ctranslate2
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from config import MODELS
from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.conversions import to_ctranslate2
from model.formats.weights import export_model, model_directory
from model.nn.registry import config_from, family_of
from tests.data.files import read_pairs


def random_model(directory):
    """Write `small` with random weights and its tokenizer; returns its directory."""
    train_tokenizer([PROBE] * 3, 507, directory / "tokenizer")
    model_config = config_from(MODELS["small"] | dict(vocab_size=29_298))
    model = family_of(model_config).build(model_config).initialise(0)
    export_model(model, load_tokenizer(directory / "tokenizer"), directory / "model")
    return directory / "model"


def with_transformers(model, tokenizer, texts, least, most):
    """Ids of the greedy answers, of `least` to `most` tokens."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        rows = model.generate(**inputs, do_sample=False, min_new_tokens=least, max_new_tokens=most)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return [[token for token in row[1:].tolist() if token not in ends] for row in rows]


def with_ctranslate2(model, ngram, tokenizer, texts, least, most):
    rows = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
    lengths = dict(min_decoding_length=least, max_decoding_length=most)
    results = model.translate_batch(rows, beam_size=1, no_repeat_ngram_size=ngram, **lengths)
    return [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]


def speed(answer, texts, batch, new_tokens):
    """Tokens a second of `answer`, called with `batch` texts at a time for exactly `new_tokens` of each."""
    answer(texts[:batch], new_tokens, new_tokens)
    started = time.perf_counter()
    for start in range(0, len(texts), batch):
        answer(texts[start : start + batch], new_tokens, new_tokens)
    return len(texts) * new_tokens / (time.perf_counter() - started)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path, nargs="?")
    parser.add_argument("--prompts", help="a file of pairs; default: made-up questions")
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new_tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        source = model_directory(options.model_dir) if options.model_dir else random_model(Path(folder))
        to_ctranslate2(source, Path(folder, "int8"))
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForSeq2SeqLM.from_pretrained(source).eval()
        fast = ctranslate2.Translator(str(Path(folder, "int8")), device="cpu", intra_threads=options.threads)
        pairs = read_pairs(options.prompts) if options.prompts else ((PROBE[n : n + 20], "") for n in range(10**6))
        texts = sorted((prompt for (prompt, _), _ in zip(pairs, range(options.num_prompts), strict=False)), key=len)
        ngram = model.generation_config.no_repeat_ngram_size or 0
        ways = partial(with_transformers, model, tokenizer), partial(with_ctranslate2, fast, ngram, tokenizer)
        for batch in (1, 16):
            slow, quick = (speed(way, texts, batch, options.new_tokens) for way in ways)
            figures = f"transformers float32 {slow:,.0f} tokens/s, CTranslate2 int8 {quick:,.0f}: {quick / slow:.1f} x"
            print(f"{batch} at once: {figures}")
        if options.model_dir:
            equal = sum(
                one == other for one, other in zip(*(way(texts, 0, options.new_tokens) for way in ways), strict=True)
            )
            print(f"{equal} of {len(texts)} answers equal")


if __name__ == "__main__":
    main()
