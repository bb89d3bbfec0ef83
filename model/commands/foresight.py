"""What would lose a run's result, or make it poor, as far as it is known before the first step.

train and doctor ask the same functions: what they say is the same.
"""

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from model.commands.space import disk_row
from model.data.file_list import names_of
from model.display.catalogue import texts_here
from model.runtime.cgroup import host_memory
from model.runtime.distributed import from_main
from model.runtime.json_stream import read_object

LOGGER = logging.getLogger("chat_trainer")
MOVED = ("True", "optimizer", "bf16")
MANY_CUT = 0.1  # share of the responses from which on a model learns to stop in the middle


@dataclass(frozen=True)
class DataFacts:
    """What is known of the pairs to train on, and how they are read."""

    names: str  # of their files
    share_cut: float  # of the responses, to max_seq_len
    longest: int  # tokens of a prompt
    pairs: int | None  # of an epoch; None: not known before all files are read
    max_seq_len: int
    vocabulary: int  # tokens of the tokenizer
    source: str  # directory of the model that is trained further, or ""


def check_disk(ranks, output_dir, num_kept, spec, resumed):
    """Raise RuntimeError on every rank if rank 0's disk cannot hold what the run writes; arguments as of disk_row."""
    from_main(ranks, _check_disk, output_dir, num_kept, spec, resumed)


def _check_disk(*run):
    row = disk_row(*run)
    if row.fails:
        raise RuntimeError(f"{row.found}: {row.remedy}")


def check_host(ranks, spec, input_bytes):
    """Raise RuntimeError on every rank if the first machine's memory cannot hold what its ranks offload.

    `input_bytes` are those of a rank's recomputed blocks.
    """
    if spec.offloads or input_bytes:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = host_bytes(spec, local_ranks) + local_ranks * input_bytes
        from_main(ranks, _check_host, needed, host_memory()[0])


def tell_what_moved(before, after):
    """Log what became of the options that left it to the plan where masters and state are held.

    `before` and `after` are values of these options by name, of `held` of a Recipe.
    """
    names = [name for name, value in before.items() if value == "auto"]
    moved = [f"{name}={after[name]}" for name in names if after[name] in MOVED]
    if moved:
        LOGGER.info(texts_here()("moved.some", options=", ".join(moved)))
    elif set(names) - {"share_state", "activation_offload"}:  # more than the default was asked for
        LOGGER.info(texts_here()("moved.none"))


def host_bytes(spec, local_ranks):
    """Bytes of host memory that a machine's ranks take for masters and state, with a save's copy of shared ones."""
    copied = 4 * spec.saved + spec.state_bytes if spec.own_part and spec.offloads else 0
    return local_ranks * spec.offloaded_bytes + copied


def _check_host(needed, available):
    if needed > available:
        raise RuntimeError(
            "what the GPUs offload (masters and optimizer state by --offload=optimizer, inputs of recomputed blocks by "
            f"--activation_offload) takes {needed / 2**30:.1f} GiB of host memory, and {available / 2**30:.1f} GiB are "
            "there: type --offload=none or --activation_offload=False"
        )


def warn_of_data(train, tokenizer, source, batch):
    """Log what `data_notes` finds in the Examples `train`; `source` and `batch` as there."""
    meta, rows = train.store.meta, max(len(train), 1)
    names = names_of([Path(file["path"]).name for file in meta["source"]["files"]])
    facts = DataFacts(
        names, share_of_cut(meta["cut"], rows), int(train.bounds[:, 0].max()), train.epoch_pairs,
        meta["source"]["max_seq_len"], tokenizer.vocab_size, source,
    )  # fmt: skip
    for found, remedy in data_notes(facts, batch):
        LOGGER.warning("%s: %s", found, remedy)


def share_of_cut(num_cut, rows):
    """Share of the responses that are cut; `num_cut` counts, for each column, those cut of so many `rows`."""
    return max(num_cut[1:], default=0) / rows  # the first column is what is asked


def data_notes(facts, batch):
    """[(what was found, what to do)] for data that make a poor model; `batch` is the number of pairs of a step."""
    text, notes, seen = texts_here(), [], seen_tokens(facts.source)
    if facts.share_cut > MANY_CUT:
        notes.append("cut")
    if facts.pairs is not None and batch > facts.pairs:
        notes.append("batch")
    if seen and facts.longest > seen:
        notes.append("seen")
    values = asdict(facts) | dict(batch=batch, seen=seen)
    return [(text(f"note.{name}", **values), text(f"note.{name}.remedy", **values)) for name in notes]


def seen_tokens(source):
    """Most tokens that the model in the directory `source` was trained to read; None where nothing there says so."""
    for folder in (Path(source), Path(source).parent) if source else ():
        try:
            values = read_object(folder / "config.json")
        except (OSError, ValueError):
            continue
        if "preset" in values:  # a run's directory, in which best/ and last/ lie
            values = values.get("config")
        names = ("max_seq_len", "n_positions", "max_position_embeddings")
        known = [values[name] for name in names if isinstance(values, dict) and isinstance(values.get(name), int)]
        if known:
            return known[0]
    return None
