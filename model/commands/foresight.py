"""What would lose a run's result, or make it poor, as far as it is known before the first step.

train and doctor ask the same functions: what they say is the same.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from model.commands.recipe import memory_spec
from model.commands.space import disk_row
from model.display.catalogue import texts_here
from model.runtime.distributed import from_main
from model.runtime.json_stream import read_object

LOGGER = logging.getLogger("chat_trainer")
MANY_CUT = 0.1  # share of the answers from which on a model learns to stop in the middle


@dataclass(frozen=True)
class DataFacts:
    """What is known of the pairs to train on."""

    names: str  # of their files
    share_cut: float  # of the answers, to max_seq_len
    longest_prompt: int  # tokens
    pairs: int | None  # of an epoch; None: not known before all files are read


def check_disk(ranks, config, model, resumed):
    """Raise RuntimeError on every rank if rank 0's disk cannot hold what the run writes; `resumed`: goes on here."""
    from_main(ranks, _check_disk, config, model, resumed)


def _check_disk(config, model, resumed):
    row = disk_row(config, memory_spec(config, model.config, model.compute_dtype, "cpu"), resumed)
    if row.fails:
        raise RuntimeError(f"{row.found}: {row.remedy}")


def warn_of_data(config, origin, train, batch):
    """Log what `data_notes` finds in the Examples `train`, of which a step takes `batch`."""
    meta = train.store.meta
    share_cut = max(meta["cut"][1:], default=0) / max(len(train), 1)
    names = ", ".join(Path(file["path"]).name for file in meta["source"]["files"])
    facts = DataFacts(names, share_cut, int(train.store.lengths[:, 0].max()), train.epoch_pairs)
    for found, remedy in data_notes(config, origin, facts, batch):
        LOGGER.warning("%s: %s", found, remedy)


def data_notes(config, origin, facts, batch):
    """[(what was found, what to do)] for data that make a poor model; `batch` is the number of pairs of a step."""
    text, notes = texts_here(), []
    seen = seen_tokens(config.finetune_from_ckp_file)
    values = dict(
        names=facts.names, share=facts.share_cut, most=config.max_seq_len, vocabulary=origin.tokenizer.vocab_size,
        batch=batch, pairs=facts.pairs, longest=facts.longest_prompt, seen=seen, source=config.finetune_from_ckp_file,
    )  # fmt: skip
    if facts.share_cut > MANY_CUT:
        notes.append("cut")
    if facts.pairs is not None and batch > facts.pairs:
        notes.append("batch")
    if seen and facts.longest_prompt > seen:
        notes.append("seen")
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
