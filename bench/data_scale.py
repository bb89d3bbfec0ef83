"""Measure a token store of 10 million pairs: seconds to open and to resume, pairs per second, private memory.

    python -m bench.data_scale [--pairs 10000000] [--folder DIR] [--steps 0]

Builds a synthetic store with ChatLM's lengths (about 290 bytes per pair on disk, deleted afterwards), then makes the
micro-batches of one rank as a training step does: the step's examples, the rank's share, cut, collate. Prints one JSON
line; --steps 0 is a whole epoch.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.corpus import MAX_SEQ_LEN, VOCAB_SIZE, draw_ids, draw_lengths
from bench.runs import kernel_batch
from model.data.packing import cut
from model.data.row_hashes import write_hashes
from model.data.sampler import step_at
from model.data.store_writer import ROWS_PER_BATCH, store_schema
from model.data.token_store import read_store
from model.train.objectives.pairs import Pairs

TOKEN_POOL = 20_000_000  # drawn once; each batch of pairs is a slice of it
PAIRS_A_STEP = 256
MICRO_BATCH_TOKENS = 131_072
SEED = 23333
PARTS = 10  # the steps are timed in this many parts; private memory is read after each


def main():
    parser = argparse.ArgumentParser(description="Measure a token store of 10 million pairs.")
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--folder", default=None, help="directory for the temporary store")
    parser.add_argument("--steps", type=int, default=0, help="steps to feed; 0: a whole epoch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        started = time.perf_counter()
        build = multiprocessing.get_context("spawn").Process(target=build_store, args=(Path(folder), options.pairs))
        build.start()  # in another process, so that its memory does not count
        build.join()
        result = dict(pairs=options.pairs, build_seconds=time.perf_counter() - started)
        steps = options.steps or -(-options.pairs // PAIRS_A_STEP)
        result |= measure(Path(folder), steps)
        print(json.dumps({name: round(value, 3) for name, value in result.items()}))


def build_store(directory, num_pairs, pool_tokens=TOKEN_POOL):
    """Write a store of `num_pairs` synthetic pairs in the project's format."""
    rng, schema, lengths = np.random.default_rng(0), store_schema(Pairs.columns, VOCAB_SIZE), []
    pool = draw_ids(pool_tokens, VOCAB_SIZE, rng).astype(np.uint16)
    with pa.OSFile(str(directory / "ids.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, num_pairs, ROWS_PER_BATCH):
            lengths.append(draw_lengths(min(ROWS_PER_BATCH, num_pairs - start), rng))
            columns = []
            for column in (0, 1):
                offsets = np.append(0, np.cumsum(lengths[-1][:, column])).astype(np.int32)
                first = rng.integers(len(pool) - offsets[-1])
                columns.append(pa.ListArray.from_arrays(offsets, pool[first : first + offsets[-1]]))
            writer.write_batch(pa.record_batch(columns, schema=schema))
    np.save(directory / "lengths.npy", np.concatenate(lengths))
    whole = dict(sha256="", ids_sha256=write_hashes(directory, num_pairs, {}), source=dict(max_seq_len=MAX_SEQ_LEN))
    meta = (
        dict(
            rows=num_pairs, rows_of_files=[num_pairs], empty=0, tokens=[0, 0], cut=[0, 0], turns_left_out=0, ignored=""
        )
        | whole
    )
    (directory / "meta.json").write_text(json.dumps(meta))


def measure(directory, num_steps):
    """Seconds to open and to resume, pairs/s, growth of private memory in MB."""
    before = private_bytes()
    started = time.perf_counter()
    store = read_store(directory)
    result = dict(open_seconds=time.perf_counter() - started)
    resumes = []
    for position in np.random.default_rng(1).integers(len(store), size=5).tolist():
        started = time.perf_counter()
        feed(read_store(directory), position)
        resumes.append(time.perf_counter() - started)
    result["resume_seconds"] = max(resumes)
    rates, private = [], [private_bytes()]
    for steps in np.array_split(np.arange(num_steps), PARTS):
        started = time.perf_counter()
        pairs = sum(feed(store, int(step) * PAIRS_A_STEP) for step in steps)
        rates.append(pairs / (time.perf_counter() - started))
        private.append(private_bytes())
    return result | dict(
        fed_steps=num_steps, pairs_per_second=float(np.median(rates)), slowest_part=min(rates),
        growth_mb=(max(private) - before) / 1e6, growth_over_the_feed_mb=(private[-1] - private[1]) / 1e6,
    )  # fmt: skip


def feed(store, position):
    """Make the micro-batches of the step that begins at pair `position`; returns the step's number of pairs."""
    examples = step_at(position, len(store), PAIRS_A_STEP, SEED)
    for part in cut(examples.ids, store.lengths[examples.ids], MICRO_BATCH_TOKENS):
        kernel_batch(store, part)
    return len(examples.ids)


def private_bytes():
    """Bytes of this process's RssAnon: memory that is not backed by a file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
