"""Which files an option such as --train_file names, and how often their pairs come in an epoch."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from model.data.compressed import data_suffix
from model.data.hf_datasets import dataset_files, dataset_reference
from model.runtime.paths import check_path

MAX_NAMED = 6
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".arrow")
WEIGHT = re.compile(r"(?P<name>.+)(?P<sign>[:*])(?P<weight>[^:*/]+)")


@dataclass(frozen=True)
class DataFile:
    """A file, and its weight: how often each of its rows comes in an epoch, on average."""

    path: str
    weight: float = 1.0
    objective: str = ""  # what its rows are learnt for; "": nothing was said


def data_files(text, split="train", objectives=()):
    """The DataFile of each name in `text`, which are separated by commas; a folder stands for the files in it, by name.

    One of the `objectives` may stand before a name, as in span:FILE. A dataset stands for its split of the name
    `split`, and DATASET[NAME] for another one. A name that ends in :NUMBER or *NUMBER has that weight. A name that
    exists as it is written is taken as it is. Raises one ValueError that lists every problem; a file that does not
    exist is not one.
    """
    names = [text] if os.path.exists(text) else [name.strip() for name in text.split(",")]
    found, problems = [], []
    for name in names:
        try:
            objective, sign, rest = name.partition(":")
            objective, name = (objective, rest.strip()) if sign and objective in objectives else ("", name)
            path, weight = _parse(name)
            found += [DataFile(each, weight, objective) for each in files_in(path, split=split)]
        except ValueError as error:
            problems.append(str(error))
    counts = Counter((file.objective, file.path) for file in found)
    twice = sorted({path for (_, path), count in counts.items() if count > 1})
    problems += [f"{path} is named twice: write {path}*2" for path in twice]
    if problems:
        raise ValueError("\n  ".join(problem.replace("\n", "\n  ") for problem in problems))
    return tuple(found)


def _parse(name):
    """(path, weight) of one name."""
    if not name:
        raise ValueError("a name between two commas is empty: write FILE,FILE")
    match = WEIGHT.fullmatch(name)
    if match is None or os.path.exists(name):
        return name, 1.0
    try:
        weight = float(match["weight"])
    except ValueError:
        if match["sign"] == ":":
            return name, 1.0  # a part of the name
        weight = math.nan
    if not 0.001 <= weight <= 1000:
        raise ValueError(f"{name}: a weight must be a number from 0.001 to 1000, as in {match['name']}*2")
    return match["name"], weight


def files_in(path, suffixes=SUFFIXES, split="train"):
    """The path of a file, or those of the files in a folder, by name, or in a dataset's split; ValueError for none."""
    check_path(path)
    folder, dataset = Path(path), dataset_reference(path, suffixes)
    if dataset:
        return dataset_files(dataset, suffixes, split)
    if not folder.is_dir():
        return [path]
    found = [str(each) for each in sorted(folder.iterdir()) if data_suffix(each) in suffixes and each.is_file()]
    if not found:
        raise ValueError(f"{path}: the folder holds no {', '.join(suffixes)} file")
    return found


def names_of(paths):
    """The paths as one phrase; of more than MAX_NAMED the first ones, and how many others there are."""
    first, others = ", ".join(map(str, paths[:MAX_NAMED])), len(paths) - MAX_NAMED
    return f"{first} and {others:,} more" if others > 0 else first


def unweighted_files(text, split, objectives=()):
    """The DataFiles of `data_files`; raises ValueError also for a weight."""
    files = data_files(text, split, objectives)
    if weighted := [file for file in files if file.weight != 1]:
        raise ValueError(f"{weighted[0].path}: only training files have a weight, and it is {weighted[0].weight:g}")
    return files
