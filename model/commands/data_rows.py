"""What doctor finds out about the data files."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

from model.commands.foresight import DataFacts, data_notes, share_of_cut
from model.commands.objective import objective_of
from model.commands.options import FILE_OPTIONS
from model.commands.space import Row
from model.data.store_writer import column_lengths
from model.display.catalogue import texts_here

FIRST_ROWS = 2000  # of each data file are read


def data_rows(config, recipe, tokenizer):
    """Rows of the data files that the options name; without a Recipe they are read and not encoded."""
    for what, parse in FILE_OPTIONS.items():
        names = getattr(config, what)
        if not names:
            continue
        try:
            files = parse(names)
        except ValueError as error:
            yield Row(what, names, str(error), fails=True)
            continue
        known = []
        for file in files:
            row, facts = _first_rows(what, file.path, config, recipe, tokenizer)
            known += [facts] if facts else []
            weighted = texts_here()("doctor.weight", found=row.found, weight=file.weight)
            yield row if file.weight == 1 else replace(row, found=weighted)
        if what == "train_file":
            yield from _notes(known, recipe and recipe.global_batch)


def _notes(known, batch):
    """Rows of what train would warn of; the batch is compared where all files are shorter than what was read."""
    total = sum(facts.pairs or 0 for facts in known) if all(facts.pairs for facts in known) else None
    rows = [note for facts in known for note in data_notes(replace(facts, pairs=None), batch)]
    if known:
        rows += data_notes(replace(known[0], share_cut=0.0, longest=0, pairs=total), batch)
    return [Row("pairs", found, remedy) for found, remedy in rows]


def _first_rows(what, file, config, recipe, tokenizer):
    """(Row, DataFacts or None) of the first rows of a data file."""
    try:
        objective = recipe.objective if recipe else objective_of(config)
        columns = config.prompt_column, config.response_column
        rows = list(islice(objective.read(file, columns, Counter()), FIRST_ROWS))
    except ValueError as error:
        return Row(what, file, str(error), fails=True), None
    text = texts_here()
    found = text("doctor.rows", file=file, size=Path(file).stat().st_size / 2**20, count=len(rows))
    if not recipe:
        return Row(what, found), None
    encoded = objective.encode(rows, tokenizer, config.max_seq_len)
    if not encoded.columns[0]:
        remedy = text("doctor.no_rows", count=len(rows), needs=objective.needs)
        return Row(what, file, remedy, fails=len(rows) < FIRST_ROWS), None  # else later rows may be usable
    lengths = column_lengths(encoded)
    tokens = " + ".join(map(str, objective.length_bounds(lengths)[0]))
    facts = DataFacts(
        Path(file).name, share_of_cut(encoded.num_cut, len(lengths)), int(lengths[:, 0].max()),
        len(lengths) if len(rows) < FIRST_ROWS else None,
        config.max_seq_len, tokenizer.vocab_size, config.finetune_from_ckp_file,
    )  # fmt: skip
    return Row(what, text("doctor.first_example", found=found, tokens=tokens)), facts
