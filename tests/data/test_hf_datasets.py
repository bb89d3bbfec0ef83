"""Hugging Face datasets on this machine: saved folders, downloaded repositories and names in the caches, by split."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, load_dataset

from model.data.file_list import data_files, files_in, unweighted_files
from tests.data.files import read_pairs

ROOT = Path(__file__).resolve().parents[2]


def rows_of(split, count=3):
    return Dataset.from_list([{"prompt": f"{split} {i}", "response": "r"} for i in range(count)])


def prompts(text, split="train"):
    return [prompt for file in data_files(text, split) for prompt, _ in read_pairs(file.path)]


def refusal(text, split="train"):
    with pytest.raises(ValueError) as caught:
        data_files(text, split)
    return str(caught.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def saved(here):
    rows_of("alone").save_to_disk("alone", num_shards=2)
    splits = {name: rows_of(name) for name in ("train", "validation", "extra")}
    DatasetDict(splits).save_to_disk("dict")
    return here


def repository(folder, card, *names):
    """A downloaded repository with a file of one pair for each name; its prompt is the name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            Dataset.from_list([{"prompt": name, "response": "r"}]).to_parquet(path)
        else:
            path.write_text(json.dumps(dict(prompt=name, response="r")))
    (folder / "README.md").write_text(card)
    (folder / ".gitattributes").touch()
    return folder


def test_a_saved_dataset_gives_the_files_of_its_split(saved):
    assert prompts("alone") == [f"alone {i}" for i in range(3)] and len(data_files("alone*2")) == 2
    assert {file.weight for file in data_files("alone*2,dict[extra]:0.5")} == {2, 0.5}
    assert prompts("dict", "validation")[0] == "validation 0" and prompts(f"{saved}/dict[extra]")[0] == "extra 0"
    assert [Path(file.path).parts[-2:] for file in unweighted_files("dict[extra]", "test")] == [
        ("extra", "data-00000-of-00001.arrow")
    ]


def test_a_split_that_is_not_there_is_refused_with_those_that_are(saved):
    assert "no split 'test': type one of dict[train], dict[validation], dict[extra]" in refusal("dict", "test")
    assert "no split 'dev': type one of alone[train]" in refusal("alone[dev]")
    assert "must be the name of a split, as in dict[train]" in refusal("dict[train:10%]")
    assert "has no subsets: type dict" in refusal("dict:english")
    Path("a.json").write_text("{}")
    assert "a.json is a file, which has no splits" in refusal("a.json[train]")
    Path("dict/train/data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow is missing" in refusal("dict")
    Path("alone/state.json").write_text('{"_data_files": [{"filename": "../other.arrow"}]}')
    assert "does not say what is beside it" in refusal("alone")


def test_a_downloaded_repository_is_read_by_its_card_or_by_the_names_of_its_files(here):
    names = [f"data/train-0000{i}-of-00002.parquet" for i in range(2)]
    repository(here / "sharded", "no card", *names, "data/test_sft-00000-of-00001.parquet")
    assert prompts("sharded") == names and prompts("sharded[test_sft]") == ["data/test_sft-00000-of-00001.parquet"]
    repository(here / "named", "", "train.jsonl", "dev.jsonl", "test.jsonl", "notes.md")
    assert [prompts("named", split) for split in ("train", "validation", "test")] == [
        ["train.jsonl"], ["dev.jsonl"], ["test.jsonl"]
    ]  # fmt: skip
    card = "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: a/*.jsonl\n"
    card += "- config_name: zh\n  data_dir: b\n---\n"
    repository(here / "sub[1]", card, "a/1.jsonl", "a/2.jsonl", "b/3.jsonl")
    assert "several subsets: type one of sub[1]:en, sub[1]:zh" in refusal("sub[1]")
    os.rename("sub[1]", "subsets")
    assert prompts("subsets:en[train]") == ["a/1.jsonl", "a/2.jsonl"] and prompts("subsets:zh") == ["b/3.jsonl"]


@pytest.mark.parametrize(
    "path, reason",
    [
        ("../secret.jsonl", "is not in its folder"),
        ("/etc/*.json", "is not in its folder"),
        ("https://host/x.jsonl", "is not in its folder"),
        ("hf://datasets/a/b.jsonl", "is not in its folder"),
        ("gone/*.jsonl", "finish its download"),
        ("[unclosed: {", "cannot be read"),
        ("*a*a*a*a*a.jsonl", "more than 4 wildcards"),
    ],
)
def test_a_card_leads_only_to_files_in_its_folder(here, path, reason):
    Path("secret.jsonl").write_text('{"prompt": "p", "response": "r"}')
    text = path if "unclosed" in path else f'"{path}"'
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {text}\n---\n"
    repository(here / "set", card, "train.jsonl")
    assert reason in refusal("set")


def test_a_repository_of_code_is_refused_and_the_code_is_not_run(here):
    (here / "scripted").mkdir()
    (here / "scripted" / "scripted.py").write_text("open('ran', 'w')")
    (here / "scripted" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "own code is never run" in refusal("scripted") and "refs/convert/parquet" in refusal("scripted")
    assert not Path("ran").exists()


def test_a_plain_folder_of_files_is_all_its_files_as_it_was(here):
    for name in ("train.csv", "test.jsonl.gz", "README.md"):
        (here / "plain" / name).parent.mkdir(exist_ok=True)
        (here / "plain" / name).write_text("")
    assert [Path(path).name for path in files_in("plain")] == ["test.jsonl.gz", "train.csv"]


CACHES = """
import json, sys
from model.data.file_list import data_files
for text in sys.argv[1:]:
    try:
        print(json.dumps([file.path for file in data_files(text)]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def in_caches(folder, *texts):
    """The paths of each text, or the refusal, in a process whose caches are in `folder`; it can reach no machine."""
    unset = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= dict(HF_HOME=f"{folder}/hf", MODELSCOPE_CACHE=f"{folder}/ms", HF_ENDPOINT="http://127.0.0.1:9")
    command = [sys.executable, "-c", CACHES, *texts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return map(json.loads, done.stdout.splitlines())


def test_a_name_is_found_in_each_cache_and_a_name_that_is_nowhere_says_how_to_download_it(here):
    for subset in ("en", "zh"):
        repository(here / "org" / "MySet", "", f"{subset}.jsonl")
        made = load_dataset("json", data_files=f"org/MySet/{subset}.jsonl", split="train", cache_dir=here / "made")
        folder = Path(made.cache_files[0]["filename"]).parent
        info = json.loads((folder / "dataset_info.json").read_text()) | dict(dataset_name="my_set", config_name=subset)
        there = here / "hf" / "datasets" / "org___my_set" / subset / "0.0.0" / "abc"
        there.parent.mkdir(parents=True)
        os.rename(folder, there)
        (there / "json-train.arrow").rename(there / "my_set-train.arrow")
        (there / "dataset_info.json").write_text(json.dumps(info))
    cached = here / "hf" / "hub" / "datasets--org--hub-set"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("c0ffee")
    snapshot = repository(cached / "snapshots" / "c0ffee", "", "train.jsonl", "test.jsonl")
    (cached / "blobs").mkdir()
    os.rename(snapshot / "train.jsonl", cached / "blobs" / "5ha1")
    (snapshot / "train.jsonl").symlink_to("../../blobs/5ha1")
    other = repository(here / "ms" / "datasets" / "org" / "other", "", "train.jsonl")

    names = ("org/MySet:zh[train]", "org/MySet", "org/hub-set", "org/other", "org/none", "tests/none")
    (prepared,), ambiguous, in_hub, in_modelscope, nowhere, mistyped = in_caches(here, *names)
    assert [prompt for prompt, _ in read_pairs(prepared)] == ["zh.jsonl"]
    assert "several subsets: type one of org/MySet:en, org/MySet:zh" in ambiguous
    assert in_hub == [str(snapshot / "train.jsonl")] and in_modelscope == [str(other / "train.jsonl")]
    for part in (
        "no such file or folder here", f"{here}/hf/datasets", f"{here}/hf/hub/datasets--org--none",
        "hf download org/none --repo-type dataset ", "HF_ENDPOINT=ADDRESS hf download org/none --repo-type dataset",
        "modelscope download --dataset org/none --local_dir data/none",
    ):  # fmt: skip
        assert part in nowhere
    assert mistyped == "tests/none: no such file or folder", "and no organisation's dataset"


def test_ordinary_files_and_folders_import_no_datasets(saved):
    code = "import sys; from model.data.file_list import data_files; data_files('a.parquet,alone,dict[extra],b.csv')"
    code += "; assert not {'datasets', 'pandas', 'pyarrow'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | dict(PYTHONPATH=str(ROOT)), cwd=saved)
    assert done.returncode == 0
