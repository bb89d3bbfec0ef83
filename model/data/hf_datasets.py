"""Finds the files of Hugging Face datasets on this machine, by split. Connects to nothing and runs no dataset's code.

A dataset is a folder written by save_to_disk, a downloaded repository, or a name in the caches of `datasets`,
huggingface_hub or ModelScope. `datasets` is imported only where such a name needs it.
"""

import glob
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from model.data.compressed import data_suffix
from model.data.hub_names import HUB_NAME, how_to_download, modelscope_hub
from model.runtime.json_stream import read_object

REFERENCE = re.compile(r"(?P<place>[^\[\]]+?)(:(?P<subset>[^:/\\\[\]*]+))?(\[(?P<split>[^\[\]]*)\])?")
SPLIT_NAME = re.compile(r"\w[\w.-]*")
FILE_NAME = re.compile(r"(?!\.)[^/\\\0]+")
SAVED, SAVED_DICT, PREPARED, CARD = "state.json", "dataset_dict.json", "dataset_info.json", "README.md"
MAX_CARD_CHARS, MAX_WILDCARDS = 1 << 20, 4  # more of them, and a name takes minutes to compare
NO_CODE = (
    "a dataset's own code is never run: download its parquet with hf download NAME --repo-type dataset --revision "
    "refs/convert/parquet --local-dir data/NAME, then type data/NAME"
)


@dataclass(frozen=True)
class Reference:
    """What a name such as squad:plain_text[train] asks for; "" is what the name leaves out."""

    text: str
    place: str  # a folder or a dataset's name
    subset: str  # which datasets calls a configuration
    split: str

    def typed(self, subset: str, split: str) -> str:
        """How another subset or split of the same dataset is typed."""
        return f"{self.place}{subset and f':{subset}'}{split and f'[{split}]'}"


def dataset_reference(text: str, suffixes: tuple[str, ...]) -> Reference | None:
    """The Reference in `text`; None if it names a file, a folder of files or a file that is not there.

    Raises ValueError for a part of a split, and for a split of a file.
    """
    path, match = Path(text), REFERENCE.fullmatch(text)
    if path.is_dir():
        return Reference(text, text, "", "") if _is_dataset(path, suffixes) else None
    if match is None or path.exists() or data_suffix(text) in (*suffixes, ".txt"):
        return None
    place, subset, split = match["place"], match["subset"] or "", match["split"]
    if split is not None and not SPLIT_NAME.fullmatch(split):
        raise ValueError(f"{text}: [{split}] must be the name of a split, as in {place}[train]; a part is not taken")
    if Path(place).is_file():
        raise ValueError(f"{text}: {place} is a file, which has no splits: type {place}")
    if Path(place).is_dir() or (HUB_NAME.fullmatch(place) and data_suffix(place) not in (*suffixes, ".txt")):
        return Reference(text, place, subset, split or "")
    return None


def _is_dataset(folder, suffixes):
    """True for a folder that `datasets` or a hub laid out, or that has data files only in folders below it."""
    is_laid_out = any((folder / name).is_file() for name in (SAVED_DICT, PREPARED, ".gitattributes"))
    if is_laid_out or _card_text(folder):
        return True
    has_files = any(data_suffix(each) in suffixes for each in folder.iterdir() if each.is_file())
    return not has_files and any(each.is_dir() and not each.name.startswith(".") for each in folder.iterdir())


def dataset_files(reference: Reference, suffixes: tuple[str, ...], usual_split: str) -> list[str]:
    """The paths of the files of a split: the one asked for, else `usual_split`, else the only one.

    Raises ValueError, with what to type, if there is no such dataset, subset or split here, or its files are of
    other formats than `suffixes`.
    """
    folder = Path(reference.place)
    splits = _splits_of(folder, reference, suffixes) if folder.is_dir() else _cached_splits(reference, suffixes)
    names = [reference.split] if reference.split else [usual_split, *splits][: None if len(splits) == 1 else 1]
    chosen = next((name for name in names if name in splits), None)
    if chosen is None:
        others = ", ".join(reference.typed(reference.subset, name) for name in splits)
        raise ValueError(f"{reference.text}: it has no split {names[0]!r}: type one of {others}")
    files = splits[chosen]
    if missing := [path for path in files if not Path(path).is_file()]:
        raise ValueError(f"{reference.text}: {missing[0]} is missing: copy or download the whole dataset again")
    if not files:
        raise ValueError(f"{reference.text}: its split {chosen!r} has no files: copy or download it again")
    return files


def _splits_of(folder, reference, suffixes):
    """{split: paths} of a dataset's folder."""
    is_saved = (folder / SAVED).is_file() and (folder / PREPARED).is_file()
    if (folder / SAVED_DICT).is_file() or is_saved:
        if reference.subset:
            raise ValueError(f"{reference.text}: a saved dataset has no subsets: type {reference.place}")
        return {name: paths for part in _saved_parts(folder) for name, paths in _saved(part).items()}
    if (folder / PREPARED).is_file() and any(folder.glob("*.arrow")):
        return _prepared(folder)
    return _repository_splits(folder, reference, suffixes)


def _saved_parts(folder):
    if not (folder / SAVED_DICT).is_file():
        return [folder]
    names = read_object(folder / SAVED_DICT).get("splits")
    return [folder / name for name in _plain_names(folder / SAVED_DICT, names)]


def _saved(folder):
    """{split: paths} of a Dataset that save_to_disk wrote; the split of a DatasetDict is its folder's name."""
    state = read_object(folder / SAVED)
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder}: it is saved as a selection of rows: load it with datasets and save_to_disk again")
    files = state.get("_data_files")
    names = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else None
    is_part = (folder.parent / SAVED_DICT).is_file()
    split = folder.name if is_part else state.get("_split") or "train"
    return {str(split): [str(folder / name) for name in _plain_names(folder / SAVED, names)]}


def _plain_names(source, names):
    """The names; raises ValueError unless they are those of files or folders beside `source`."""
    if not isinstance(names, list) or not all(isinstance(name, str) and FILE_NAME.fullmatch(name) for name in names):
        raise ValueError(f"{source}: it does not say what is beside it: save the dataset again")
    return names


def _prepared(folder):
    """{split: paths} of a folder in the cache of `datasets`."""
    from datasets import DatasetInfo
    from datasets.naming import filenames_for_dataset_split

    try:
        info = DatasetInfo.from_directory(str(folder))
        return {
            name: filenames_for_dataset_split(str(folder), info.dataset_name, name, "arrow", split.shard_lengths)
            for name, split in info.splits.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / PREPARED}: it cannot be read ({error}): load the dataset again") from None


def _cached_splits(reference, suffixes):
    """{split: paths} of a dataset's name: from the cache of `datasets`, else of what a hub's program downloaded."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    name = reference.place
    folders, modelscope = _prepared_folders(name, HF_DATASETS_CACHE), modelscope_hub() / "datasets" / name
    downloaded = _snapshot(name) or (modelscope if modelscope.is_dir() else None)
    if folders and (reference.subset in folders or not (reference.subset and downloaded)):
        return _prepared(folders[_chosen(reference, folders, next(iter(folders)) if len(folders) == 1 else "")])
    if downloaded:
        return _repository_splits(downloaded, reference, suffixes)
    if Path(name.split("/")[0]).is_dir():  # a file's path, and no organisation's name
        raise ValueError(f"{reference.text}: no such file or folder")
    repository = Path(HF_HUB_CACHE, "datasets--" + name.replace("/", "--"))
    raise ValueError(
        f"{reference.text}: no such file or folder here; no dataset {name} in {HF_DATASETS_CACHE}, {repository}, "
        f"{modelscope}\n{how_to_download(name, 'dataset')}"
    )


def _prepared_folders(name, cache):
    """{subset: the newest folder of it} in the cache of `datasets`."""
    from datasets.naming import camelcase_to_snakecase

    organisation, _, last = name.rpartition("/")
    root = Path(cache, "___".join(filter(None, (organisation, camelcase_to_snakecase(last)))))
    found = [path.parent for path in root.glob(f"*/*/*/{PREPARED}")]
    return {path.parts[-3]: path for path in sorted(found, key=lambda path: path.stat().st_mtime)}


def _snapshot(name):
    """The folder of a dataset in the cache of huggingface_hub; None without one."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (ValueError, OSError):  # no name that the hub accepts, or nothing of it here
        return None


def _chosen(reference, subsets, default):
    """The subset that is asked for, else `default`; raises ValueError if it is not among `subsets`."""
    name = reference.subset or default
    if name in subsets:
        return name
    typed = ", ".join(reference.typed(each, reference.split) for each in sorted(subsets))
    asked = f"no subset {name!r}" if name else "several subsets"
    raise ValueError(f"{reference.text}: it has {asked}: type one of {typed}")


def _repository_splits(folder, reference, suffixes):
    """{split: paths} of a downloaded repository: as its README.md says, else by the files' names."""
    from datasets.data_files import get_data_patterns

    subsets = _subsets(folder)
    defaults = [name for name, said in subsets.items() if name == "default" or said.get("default") or len(subsets) == 1]
    said = subsets[_chosen(reference, subsets, defaults[0] if defaults else "")]
    base, patterns = _inside(folder, said.get("data_dir") or "."), said.get("data_files")
    try:
        patterns = (
            _patterns(folder / CARD, patterns) if patterns else get_data_patterns(glob.escape(os.path.abspath(base)))
        )
        return _readable(reference, {split: _matches(base, each) for split, each in patterns.items()}, suffixes)
    except FileNotFoundError:
        raise ValueError(f"{reference.text}: {folder} has no data files: finish its download") from None


def _subsets(folder):
    """{subset: what README.md says of it}; one named default if it says nothing."""
    from huggingface_hub import DatasetCard

    card, text = folder / CARD, _card_text(folder)
    if not text:
        return dict(default={})
    try:
        configs = DatasetCard(text, ignore_metadata_errors=True).data.to_dict().get("configs")
    except Exception as error:  # whatever a stranger's YAML makes of its parser
        raise ValueError(f"{card}: its first lines cannot be read ({error}): download it again") from None
    named = [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []
    return {str(each.get("config_name")): each for each in named} or dict(default={})


def _card_text(folder):
    """The text of a README.md that begins as the hubs' do, with a block of YAML; "" of any other."""
    try:
        with open(folder / CARD, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CARD_CHARS)
    except (FileNotFoundError, IsADirectoryError):
        return ""
    return text if text.startswith("---") else ""


def _patterns(card, data_files):
    """{split: patterns of files} of what a README.md says in any of the ways that it may."""
    from datasets.data_files import sanitize_patterns

    try:
        patterns = sanitize_patterns(data_files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{card}: its data_files cannot be read ({error}): download it again") from None
    for pattern in (each for split in patterns.values() for each in split):
        if len(re.findall(r"\*+", str(pattern))) > MAX_WILDCARDS:
            raise ValueError(
                f"{card}: {str(pattern)[:80]!r} has more than {MAX_WILDCARDS} wildcards: type a file's path"
            )
    return patterns


def _matches(base, patterns):
    """The files in the folder `base` that patterns describe; FileNotFoundError if one without wildcards is missing."""
    from datasets.data_files import resolve_pattern

    found = []
    for pattern in patterns:
        _inside(base, pattern)
        try:
            found += resolve_pattern(pattern, glob.escape(os.path.abspath(base)))
        except FileNotFoundError:
            if not glob.has_magic(pattern):
                raise
    return sorted(dict.fromkeys(found))


def _inside(folder, name):
    """The path of a name in the folder; raises ValueError for one that leads out of it or to another machine."""
    if not isinstance(name, str) or ".." in Path(name).parts or Path(name).is_absolute() or ":" in name:
        raise ValueError(f"{folder / CARD}: {str(name)[:80]!r} is not in its folder, and only that is read")
    return folder / name


def _readable(reference, splits, suffixes):
    """The splits with only the files of the suffix that most of all files have among `suffixes`."""
    found = Counter(data_suffix(path) for paths in splits.values() for path in paths)
    if not found:
        raise FileNotFoundError
    known = [suffix for suffix in suffixes if found[suffix]]
    if not known:
        hint = f"; {NO_CODE}" if found[".py"] else ""
        names = ", ".join(sorted(filter(None, found))) or "no data files"
        raise ValueError(f"{reference.text}: its files are {names}; {', '.join(suffixes)} are read{hint}")
    most = max(known, key=lambda suffix: found[suffix])
    alike = {".json", ".jsonl"} if most in (".json", ".jsonl") else {most}
    kept = {split: [path for path in paths if data_suffix(path) in alike] for split, paths in splits.items()}
    return {split: paths for split, paths in kept.items() if paths}
