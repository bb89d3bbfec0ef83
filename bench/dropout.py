"""Does training get worse without dropout on attention probabilities? Trains transformers' T5 with it and without it.

    python -m bench.dropout --train_file FILE --validation_file FILE --tokenizer_dir DIR [--dropout 0.1] [--seeds 0,1]

All trainings of a seed have the same pairs in the same order and the same initial weights. Dropout is everywhere, as in
T5, or everywhere except on the attention probabilities, as in this trainer. Prints one JSON line per training with its
validation loss.
"""

import argparse
import json
from dataclasses import asdict, replace

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from bench.loops import pad
from bench.runs import open_pairs
from model.data.sampler import step_at
from model.data.tokenizer import load_tokenizer
from model.nn.registry import load_model_config
from model.train.lr_schedule import LearnRate

MAX_SEQ_LEN, WARMUP_STEPS = 256, 300


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("train_file", "validation_file", "tokenizer_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model", default="small")
    parser.add_argument("--pairs", type=int, default=64, help="per step")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=1e-2, help="peak learning rate of torch's Adafactor")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seeds", default="0,1")
    given = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(given.tokenizer_dir)
    train, valid = (
        open_pairs(file, tokenizer, MAX_SEQ_LEN, "model_save/tokens")
        for file in (given.train_file, given.validation_file)
    )
    for seed in map(int, given.seeds.split(",")):
        for on_probabilities in (True, False):
            model = make_t5(given, tokenizer, seed, on_probabilities).to(device)
            loss = train_once(given, model, train, valid, seed)
            record = dict(bench="dropout", model=given.model, dropout=given.dropout, seed=seed, steps=given.steps)
            record |= dict(on_probabilities=on_probabilities, validation_loss=round(loss, 4))
            print(json.dumps(record), flush=True)


def train_once(given, model, train, valid, seed):
    """Validation loss after one training."""
    optimizer, device = torch.optim.Adafactor(model.parameters(), given.rate), model.device
    rate = LearnRate(given.rate, "cosine", WARMUP_STEPS * given.pairs, given.steps * given.pairs)
    for step in range(given.steps):
        ids = step_at(step * given.pairs % len(train), len(train), given.pairs, seed).ids
        optimizer.param_groups[0]["lr"] = rate.at(step * given.pairs)
        loss_of(model, train, ids, device).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return evaluate(model.eval(), valid, device)


def make_t5(given, tokenizer, seed, on_probabilities):
    """transformers' T5, with dropout of attention probabilities too if `on_probabilities`."""
    torch.manual_seed(seed)
    model_config = replace(load_model_config(given.model), vocab_size=tokenizer.vocab_size)
    ids = dict(pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id, decoder_start_token_id=tokenizer.pad_id)
    kind = dict(feed_forward_proj="relu", tie_word_embeddings=True, use_cache=False)
    config = T5Config(**asdict(model_config) | ids | kind, dropout_rate=given.dropout)
    model = T5ForConditionalGeneration(config).train()
    for module in model.modules():
        if isinstance(module, T5Attention) and not on_probabilities:
            module.dropout = 0.0
    return model


def loss_of(model, store, ids, device):
    """Mean loss per target token of these pairs, nats."""
    prompts, responses = store.tokens(ids)
    prompt_ends, response_ends = (np.cumsum(side)[:-1] for side in store.lengths[ids].astype(np.int64).T)
    sides = zip(np.split(prompts, prompt_ends), np.split(responses, response_ends), strict=True)
    batch = pad([dict(input_ids=prompt, labels=response) for prompt, response in sides])
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss


@torch.no_grad()
def evaluate(model, store, device, pairs=64):
    """Mean loss per target token of all pairs, nats."""
    total = 0.0
    for start in range(0, len(store), pairs):
        ids = np.arange(start, min(start + pairs, len(store)))
        total += float(loss_of(model, store, ids, device)) * int(store.lengths[ids, 1].sum(dtype=np.int64))
    return total / int(store.lengths[:, 1].sum(dtype=np.int64))


if __name__ == "__main__":
    main()
