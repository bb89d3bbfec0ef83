"""Fuzz targets: for each reader of this project, how an input is made and how the result is judged.

A target is a function of (draw, folder): it writes one mutated input into the empty directory `folder`, reads it as a
run would, and asserts that it was read correctly. `draw` is a random.Random.
"""

import contextlib
import copy
import csv
import functools
import io
import json
import os
import resource
import shutil
from collections import Counter
from dataclasses import asdict, fields
from itertools import islice

import fire
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fire.decorators import SetParseFn

from config import TrainConfig
from model.commands.options import FLAGS, read_request
from model.data.columns import PROMPT_COLUMNS, RESPONSE_COLUMNS
from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_file import MAX_VOCAB_SIZE
from model.formats.weights import load_into, load_weights
from model.nn.registry import load_model_config
from model.nn.t5.network import TextToTextModel
from model.run.journal import read_journal
from tests.data.files import read_pairs
from tests.fuzz.checkpoint import check_checkpoint, tiny_run
from tests.fuzz.mutations import mutate, mutate_tree
from tests.fuzz.strangers import STRANGERS
from tests.tiny import SHAPE


def text(draw):
    return "".join(draw.choices(PROBE + '",\n\t' + "abc 😀", k=draw.randrange(1, 12)))


def rows(draw):
    names = draw.choice(PROMPT_COLUMNS), draw.choice(RESPONSE_COLUMNS)
    return [dict(zip(names, (text(draw), text(draw)), strict=True)) for _ in range(draw.randrange(1, 8))]


def dialogues(draw):
    turns = [dict(role=draw.choice(("user", "assistant", "system")), content=text(draw)) for _ in range(6)]
    return [dict(conversations=turns), dict(messages=[text(draw), text(draw)]), [dict(prompt="a", response="b")]]


def pairs_of(path):
    """The pairs of a file. A reader that skips malformed rows must report one, or give the same pairs."""
    reports, kept = [], None
    with contextlib.suppress(ValueError):
        kept = list(read_pairs(path, on_malformed=reports.append))
    try:
        found = list(read_pairs(path))
    except ValueError:
        assert reports or kept is None
        raise
    assert kept == found and all("column; found" in report for report in reports)  # a run counts these rows
    return found


def check_json(draw, folder, suffix=".json"):
    values = draw.choice((rows, rows, dialogues))(draw)
    plain = json.dumps(values, ensure_ascii=draw.random() < 0.3)
    if suffix == ".jsonl":
        plain = "\n".join(json.dumps(value, ensure_ascii=False) for value in values)
    data = mutate(draw, plain.encode(draw.choice(("utf-8", "utf-8", "utf-8-sig", "gb18030"))))
    path = folder / f"data{suffix}"
    path.write_bytes(data)
    found = pairs_of(path)
    again = folder / "again.jsonl"  # what the standard library reads from the same bytes, one value per line
    again.write_text("\n".join(json.dumps(value) for value in _json_values(decoded(data))))
    assert found == pairs_of(again)


def _json_values(text):
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip(" \t\r\n"):
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        value, at = decoder.raw_decode(text, at)
        yield value


def decoded(data):
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("gb18030")


def check_csv(draw, folder, suffix=".csv"):
    separator, values = dict([(".csv", ","), (".tsv", "\t")])[suffix], rows(draw)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(values[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(values)
    data = mutate(draw, file.getvalue().encode(draw.choice(("utf-8", "utf-8-sig", "gb18030"))))
    path, again = folder / f"data{suffix}", folder / f"again{suffix}"
    path.write_bytes(data)
    found = pairs_of(path)
    readings = []
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE)[: 1 + (suffix == ".tsv")]:
        read = list(csv.reader(io.StringIO(decoded(data), newline=""), delimiter=separator, quoting=quoting))
        with open(again, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL).writerows(filter(None, read))
        with contextlib.suppress(ValueError):
            readings.append(pairs_of(again))
    assert found in readings


def check_parquet(draw, folder):
    values = [row | dict(extra=draw.choice(([1], [], None))) for row in rows(draw)]
    table = pa.Table.from_pylist(values)
    if draw.random() < 0.3:
        name = table.column_names[1]
        kind = draw.choice((pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())))
        table = table.set_column(1, name, table[name].cast(pa.string()).cast(kind) if kind != pa.binary() else
                                 table[name].cast(kind))  # fmt: skip
    path, again = folder / "data.parquet", folder / "again.parquet"
    pq.write_table(table, path, compression=draw.choice(("none", "snappy", "zstd")), use_dictionary=draw.random() < 0.5)
    path.write_bytes(mutate(draw, path.read_bytes()))
    found = pairs_of(path)
    pq.write_table(pq.read_table(path, use_threads=False), again)
    assert found == pairs_of(again)


def check_parquet_bomb(draw, folder):
    """A small file with few distinct values and many rows, turns or nulls."""
    path, count = folder / "data.parquet", draw.choice((3, 500, 20_000, 3_000_000))
    value = text(draw) * draw.choice((1, 1000, 300_000))
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), [value])
    columns = dict(prompt=repeated, response=pa.DictionaryArray.from_arrays(repeated.indices, ["r"]))
    extra = pa.nulls(count, draw.choice((pa.string(), pa.binary(50_000 if count <= 500 else 1), pa.int64())))
    if draw.random() < 0.3:
        columns["x"] = extra
    elif draw.random() < 0.4:
        columns["prompt"] = columns["prompt"].take(pa.array(np.where(np.arange(count) % 2, 0, None)))
    elif draw.random() < 0.3:
        turn = pa.StructArray.from_arrays([columns["response"], draw.choice((repeated, extra))], ["role", "content"])
        columns = dict(messages=pa.ListArray.from_arrays([0, count], turn))
    table = pa.table(columns)
    pq.write_table(
        table,
        path,
        compression=draw.choice(("snappy", "zstd")),
        store_schema=draw.random() < 0.5,
        write_batch_size=1 << 20,
    )
    if draw.random() < 0.5:
        path.write_bytes(mutate(draw, path.read_bytes()))
    before = _peak_mib()
    try:
        found = Counter(islice(read_pairs(path, on_malformed=lambda problem: None), 20_000))
    finally:
        assert _peak_mib() - before < 400, "a small file took more than 400 MiB"
    assert len(found) < 20, "there are more distinct pairs than were written"


def _peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check_options(draw, folder):
    names = [f.name for f in fields(TrainConfig)] + list(FLAGS)
    texts = ["1", "0", "-1", "3.5", "1e3", "nan", "inf", "True", "no", "", "的", "auto", "a,b", "[1]", "'x'", "9" * 30]
    words = ["train"]
    for _ in range(draw.randrange(1, 5)):
        name = draw.choice(names)
        name = mutate(draw, name.encode()).decode(errors="ignore").replace("\0", "") if draw.random() < 0.2 else name
        default = str(getattr(TrainConfig(), name, "True"))
        words.append(f"--{name}={draw.choice(texts) if draw.random() < 0.3 else default}")
    if draw.random() < 0.1:
        words[-1] = words[-1].replace("--", draw.choice(("", "-", "---")), 1).replace("=", draw.choice(("", " ", "==")))
    requests = []
    command = SetParseFn(str)(lambda *stray, **options: requests.append(read_request(stray, options)))
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        fire.Fire(dict(train=command), words, name="train_low_mem.py")
    (request,) = requests
    for name, equals, value in (word.partition("=") for word in words[1:]):
        name, value = name.lstrip("-").replace("-", "_"), value if equals else "True"
        if (name, value) in (("learn_rate", "0.0"), ("optimizer", "auto")):
            continue  # stand for defaults that depend on other options
        if name not in FLAGS and sum(name in word for word in words) == 1:  # the last of several counts
            assert _means(value, getattr(request.config, name)), f"{name}: {value!r} was read as another value"


def _means(text, value):
    if isinstance(value, bool) or value in ("True", "False"):
        return text.lower() in (("true", "1", "yes") if value in (True, "True") else ("false", "0", "no"))
    return text == value if isinstance(value, str) else float(text) == value


def check_stored_request(draw, folder):
    stored = dict(preset="sft", given=dict(output_dir=str(folder), epochs="3", seed=5), config=asdict(TrainConfig()))
    data = json.dumps(mutate_tree(draw, stored) if draw.random() < 0.7 else stored).encode()
    (folder / "config.json").write_bytes(mutate(draw, data) if draw.random() < 0.5 else data)
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True, exist_ok=True)
    request = read_request((), dict(output_dir=str(folder), is_keep_training="auto"))
    assert request.config.output_dir == str(folder) and request.preset in ("pretrain", "sft", "sft_small", "sft_fast")


def check_model_file(draw, folder):
    path = folder / "model.json"
    tree = SHAPE | {draw.choice(list(SHAPE)): draw.choice((1, 7, 64, 300, 10**5))}
    data = json.dumps(mutate_tree(draw, tree) if draw.random() < 0.5 else tree).encode()
    path.write_bytes(mutate(draw, data) if draw.random() < 0.5 else data)
    model_config = load_model_config(str(path))
    assert asdict(model_config).items() >= json.loads(path.read_text()).items()
    with torch.device("meta"):
        TextToTextModel(model_config)


def check_tokenizer(draw, folder):
    parts, *_ = tiny_run()
    shutil.copytree(parts / "tokenizer", folder, dirs_exist_ok=True)
    victim = folder / draw.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    content = json.loads(victim.read_text())
    if draw.random() < 0.8:
        victim.write_text(json.dumps(mutate_tree(draw, content)))
    else:
        victim.write_bytes(mutate(draw, victim.read_bytes()))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(PROBE)
    assert ids == tokenizer.encode(PROBE) and max(ids) < tokenizer.vocab_size <= MAX_VOCAB_SIZE
    assert len(set(tokenizer.decode(ids)) & set(PROBE)) >= 0.9 * len(set(PROBE))


class Canary:
    """An object whose pickle makes the directory `path` if the reader runs its code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def check_weights(draw, folder):
    parts, model, _ = tiny_run()
    path, canary = folder / "weights.bin", folder / "canary"
    if draw.random() < 0.1:
        torch.save({"shared.weight": Canary(str(canary))}, path)
    elif draw.random() < 0.4:
        path.write_bytes(mutate(draw, (parts / "weights.bin").read_bytes()))
    else:
        path = folder / "model"
        shutil.copytree(parts / "exported", path)
        victim = path / draw.choice(("config.json", "model.safetensors"))
        tree = victim.suffix == ".json" and draw.random() < 0.7
        victim.write_bytes(json.dumps(mutate_tree(draw, json.loads(victim.read_text()))).encode() if tree else
                           mutate(draw, victim.read_bytes()))  # fmt: skip
    try:
        weights = load_weights(path)
        model_config = weights.model_config or model.config
        with torch.device("meta"):
            fresh = TextToTextModel(model_config)
        load_into(fresh if model_config != model.config else copy.deepcopy(model), weights, path)
    finally:
        assert not canary.exists(), "code in a weights file was run"


def check_journal(draw, folder):
    lines = [dict(kind="start", time=1.0)] + [dict(kind="train", time=2.0, step=i, loss=1.0) for i in range(1, 6)]
    lines.append(dict(kind="resume", time=3.0, step=3, pairs_seen=9))
    path = folder / "metrics.jsonl"
    path.write_bytes(mutate(draw, "".join(json.dumps(line) + "\n" for line in lines).encode()))
    assert all(isinstance(record["kind"], str) for record in read_journal(path))


TARGETS = {
    "json": check_json,
    "jsonl": functools.partial(check_json, suffix=".jsonl"),
    "csv": check_csv,
    "tsv": functools.partial(check_csv, suffix=".tsv"),
    "parquet": check_parquet,
    "parquet bomb": check_parquet_bomb,
    "checkpoint": check_checkpoint,
    "command line": check_options,
    "config.json of a run": check_stored_request,
    "model file": check_model_file,
    "tokenizer": check_tokenizer,
    "weights": check_weights,
    "journal": check_journal,
    **STRANGERS,
}
