"""What doctor finds out about the data files."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from model.commands.foresight import DataFacts, data_notes, share_of_cut
from model.commands.objective import objectives_for
from model.commands.run_files import files_of, train_option
from model.commands.space import Row
from model.data.store_writer import column_lengths, taken_rows
from model.display.catalogue import texts_here

FIRST_ROWS, FIRST_CHARS = 2000, 4 << 20  # of each data file are read


def data_rows(config, recipe, tokenizer):
    """Rows of the data files that the options name; without a Recipe they are read and not encoded."""
    for what in (train_option(config), "validation_file", "test_file"):
        names = getattr(config, what)
        if not names:
            continue
        try:
            files = files_of(config, what)
        except ValueError as error:
            yield Row(what, names, str(error), fails=True)
            continue
        known = []
        for file in files:
            row, facts = _first_rows(what, file, config, recipe, tokenizer)
            known += [facts] if facts else []
            weighted = texts_here()("doctor.weight", found=row.found, weight=file.weight)
            yield row if file.weight == 1 else replace(row, found=weighted)
        if what == train_option(config):
            yield from _notes(known, recipe and recipe.global_batch)


def _notes(known, batch):
    """Rows of what train would warn of; the batch is compared where all files are shorter than what was read."""
    total = sum(facts.pairs or 0 for facts in known) if all(facts.pairs for facts in known) else None
    rows = [note for facts in known for note in data_notes(replace(facts, pairs=None), batch)]
    if known:
        rows += data_notes(replace(known[0], share_cut=0.0, longest=0, pairs=total), batch)
    return [Row("pairs", found, remedy) for found, remedy in rows]


def _first_rows(what, named, config, recipe, tokenizer):
    """(Row, DataFacts or None) of the first rows of a DataFile."""
    file = named.path
    try:
        objective = (recipe.objectives if recipe else objectives_for(config))[named.objective]
        columns = config.prompt_column, config.response_column
        left = objective.read(file, columns, Counter())
        rows = taken_rows(left, FIRST_ROWS, FIRST_CHARS)
        is_all = next(left, None) is None
    except ValueError as error:
        return Row(what, file, str(error), fails=True), None
    text = texts_here()
    found = text("doctor.rows", file=file, size=Path(file).stat().st_size / 2**20, count=len(rows))
    if not recipe:
        return Row(what, found), None
    encoded = objective.encode(rows, tokenizer, config.max_seq_len)
    if not encoded.columns[0]:
        remedy = text("doctor.no_rows", count=len(rows), needs=objective.needs)
        return Row(what, file, remedy, fails=is_all), None  # else later rows may be usable
    lengths = column_lengths(encoded)
    bounds = objective.length_bounds(lengths)
    facts = DataFacts(
        Path(file).name, share_of_cut(encoded.num_cut, len(lengths)), int(bounds[:, 0].max()),
        len(lengths) if is_all else None,
        config.max_seq_len, tokenizer.vocab_size, config.finetune_from_ckp_file,
    )  # fmt: skip
    return Row(what, text("doctor.first_example", found=found, tokens=" + ".join(map(str, bounds[0])))), facts
