"""Measure the fill of an epoch: real tokens divided by computed tokens, both sides, on 1, 2 and 4 ranks.

    python -m bench.fill FILES... [--tokenizer_dir DIR] [--pairs 64,256,512]

`--pairs` is the number of pairs per rank and step. Computed tokens are counted in the micro-batches that a step would
run (its examples, the rank's share, cut, collate), padded as in steps captured as CUDA graphs and as in others. Prints
one JSON line per case.
"""

import argparse
import json
import tempfile
from pathlib import Path

from bench.runs import kernel_batch, open_pairs
from model.data.buckets import buckets_for
from model.data.packing import cut
from model.data.sampler import shares_of, step_at
from model.data.tokenizer import load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.memory.plan import LARGEST_MICRO_BATCH_TOKENS
from tests.data.files import read_pairs

RANKS = (1, 2, 4)
SEED = 23333


def main():
    parser = argparse.ArgumentParser(description="Measure real tokens divided by computed tokens.")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer_dir", default="", help="default: train one with 8000 tokens on each file")
    parser.add_argument("--pairs", default="64,256,512")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in map(Path, options.files):
            directory = options.tokenizer_dir or Path(folder) / path.stem
            if not options.tokenizer_dir:
                train_tokenizer((text for pair in read_pairs(path) for text in pair), 8000, directory)
            store = open_pairs(path, load_tokenizer(directory), 256, Path(folder) / "tokens")
            for pairs in map(int, options.pairs.split(",")):
                print(json.dumps(dict(file=path.name, pairs_a_rank=pairs) | fills(store, pairs)), flush=True)


def fills(store, pairs_a_rank):
    """Fill on each number of ranks, with CUDA graphs and without, and the number of captured sizes."""
    found = {}
    for world_size in RANKS:
        buckets = buckets_for(store.lengths, pairs_a_rank, num_ranks=world_size)
        found[f"{world_size} ranks"] = round(epoch_fill(store, world_size, pairs_a_rank, ())[0], 4)
        fill, sizes = epoch_fill(store, world_size, pairs_a_rank, buckets)
        found |= {f"{world_size} ranks, recorded": round(fill, 4), f"sizes at {world_size}": sizes}
    return found


def epoch_fill(store, world_size, pairs_a_rank, buckets, micro_batch_tokens=LARGEST_MICRO_BATCH_TOKENS):
    """(real / computed tokens of an epoch over all ranks, number of buckets used)."""
    real, computed, used, position = 0, 0, set(), 0
    while position < len(store):
        examples = step_at(position, len(store), world_size * pairs_a_rank, SEED)
        lengths = store.lengths[examples.ids].astype("int64")
        for share in shares_of(examples.ids, lengths, world_size):
            parts = cut(share, store.lengths[share], micro_batch_tokens)
            bucket = next((b for b in buckets if b.holds(store.lengths[share])), None) if len(parts) == 1 else None
            used.add(bucket)
            for part in parts:
                micro_batch = kernel_batch(store, part, bucket)
                computed += len(micro_batch.prompt_ids) + len(micro_batch.decoder_ids)
        real += int(lengths.sum())
        position += len(examples.ids)
    return real / computed, len(used - {None})


if __name__ == "__main__":
    main()
