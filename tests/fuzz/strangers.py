"""Fuzz targets of hostile files: tensors that expand, invalid configurations, links, terminal control characters.

As in tests/fuzz/targets.py a target is a function of (draw, folder) that writes one input, reads it and asserts that it
was read correctly.
"""

import copy
import json
import os
import re
import resource
import shutil
import struct
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import T5Config

from model.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from model.formats.weights import export_model, load_into, load_weights
from model.nn.t5.huggingface import OTHER_NAMES, SIZES
from model.run.journal import Journal, read_journal
from model.run.run_dir import admit, claim, cut_sample_ids
from model.runtime.atomic_io import write_json
from model.runtime.terminal import printable
from tests.fuzz.checkpoint import tiny_run
from tests.fuzz.mutations import mutate_tree

MAX_GROWTH_BYTES = 300 * 2**20
NAME = "encoder.final_layer_norm.weight"
SECRET = "SECRET of another user\n"
CONTROLS = [
    *map(chr, range(32)),
    *map(chr, range(127, 160)),
    *"\u202e\u2066\u200f\u2028\u061c",
    "\x1b[2J",
    "\x1b]0;x\x07",
]
NUMBERS = [0, -1, 1, 2, 3, 7, 257, 2_000_000, 2**31, 2**63, 10**40, 0.5, 1e-6, 1e308, True, None, "2", [], {}]


def text(value):
    """The pickle opcodes of a short text."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def integer(number):
    """The pickle opcodes of a 64-bit integer."""
    return b"\x8a\x08" + struct.pack("<q", number)


def pickled_tensor(held, offset, size, stride):
    """A pickle of {"shared.weight": tensor} with this offset, size and stride in a storage of `held` floats."""
    storage = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(held)
    tuples = [b"(" + b"".join(map(integer, numbers)) + b"t" for numbers in (size, stride)]
    made = b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + b"tQ" + integer(offset) + b"".join(tuples)
    return b"\x80\x02}" + text("shared.weight") + made + b"\x89ccollections\nOrderedDict\n)RtRs."


def pickled_bytes(count):
    """A pickle of {"shared.weight": bytearray(count)}, which torch would allocate while it reads the file."""
    return b"\x80\x02}" + text("shared.weight") + b"c__builtin__\nbytearray\n" + integer(count) + b"\x85Rs."


def write_archive(path, pickle, data=b"\0" * 16, compression=zipfile.ZIP_STORED):
    """Write a file like torch.save's with this pickle and one storage."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", pickle), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n")):
            archive.writestr(f"weights/{name}", content)


def _odd_tensor(draw, tensor):
    """(replacement for `tensor`, whether it is valid and must be accepted)."""
    size = 2 ** draw.randrange(1, 34)
    return draw.choice((
        lambda: (torch.zeros(1).expand(size), False),
        lambda: (torch.zeros(1, 1).expand(size, 64), False),
        lambda: (torch.zeros(2, 32).as_strided((size, 32), (0, 1)), False),
        lambda: (tensor.double(), True),
        lambda: (torch.cat([tensor, tensor])[::2].copy_(tensor), True),
        lambda: (torch.nn.Parameter(tensor.clone()), True),
        lambda: (tensor.clone().fill_(draw.choice((float("nan"), float("inf"), -float("inf")))), False),
        lambda: (tensor.to(draw.choice((torch.int8, torch.int64, torch.bool, torch.complex64))), False),
        lambda: (tensor.to(torch.float8_e4m3fn), False),
        lambda: (tensor.to_sparse(), False),
        lambda: (tensor.to("meta"), False),
        lambda: (torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), False),
        lambda: (tensor[: draw.randrange(len(tensor))].clone(), False),
        lambda: (tensor.reshape(1, -1).clone(), False),
        lambda: (draw.choice((None, 3, "x", [1], {})), False),
    ))()  # fmt: skip


def check_tensors(draw, folder):
    """Weights whose size is false or whose type is wrong: refused in little memory, or read correctly."""
    _, model, _ = tiny_run()
    path, valid = folder / "weights.bin", {name: t.detach().clone() for name, t in model.state_dict().items()}
    before, is_valid, expected = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, False, valid
    if draw.random() < 0.3:
        numbers = [draw.choice((-1, 0, 1, 2, 4, 2**20, 2**34, 2**62)) for _ in range(6)]
        pickle = pickled_tensor(numbers[0], numbers[1], numbers[2:4], numbers[4:]) if draw.random() < 0.7 else None
        write_archive(
            path, pickle or pickled_bytes(numbers[0]), b"\0" * 4 * draw.choice((1, 4, 10**6)), draw.choice((0, 8))
        )
    else:
        odd, is_valid = _odd_tensor(draw, valid[NAME])
        expected = valid | {NAME: odd}
        ending, legacy = draw.choice((".bin", ".bin", ".safetensors")), draw.random() < 0.3
        if ending == ".bin":
            torch.save(
                valid | {draw.choice(("", "module.")) + NAME: odd}, path, _use_new_zipfile_serialization=not legacy
            )
        else:
            path, expected = path.with_suffix(ending), valid
            is_valid = _save_changed_header(draw, path, valid)
    try:
        weights = load_weights(path)
        load_into(copy.deepcopy(model), weights, path)
        assert weights.tensors.keys() == valid.keys()
        assert all(torch.equal(weights.tensors[name], expected[name]) for name in valid), "wrong values"
    except ValueError:
        assert not is_valid, "a valid file is refused"
        raise
    finally:
        growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert growth < MAX_GROWTH_BYTES, f"{growth:,} bytes for a file of {path.stat().st_size:,}"


def _save_changed_header(draw, path, tensors):
    """Write a .safetensors file with at most one change in its header; returns True if nothing was changed."""
    save_file(tensors, path)
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    entry = header[NAME]
    change = draw.choice(("none", "shape", "data_offsets", "dtype"))
    if change == "shape":
        entry["shape"] = draw.choice(([2**34], [2**40, 0], [0], [1] * 70, [-1], [2**63], [], {}))
    elif change == "data_offsets":
        entry["data_offsets"] = draw.choice(([0, 2**40], [0, 0], [64, 0], [-64, 0], [2**63, 2**64], [0]))
    elif change == "dtype":
        entry["dtype"] = draw.choice(("I32", "U8", "BOOL", "F64", "F8_E4M3", "F4", "C64", "X", 3, None))
    new = json.dumps(header).encode()
    claimed = len(new) if draw.random() < 0.8 else draw.choice((0, 2**20, 2**40, 2**64 - 1))
    path.write_bytes(struct.pack("<Q", claimed) + new + data[8 + size :])
    return change == "none" and claimed == len(new)


def check_model_config(draw, folder):
    """A mutated config.json of a Hugging Face model: refused, or read as transformers' T5Config reads it."""
    parts, *_ = tiny_run()
    shutil.copytree(parts / "exported", folder / "model")
    path = folder / "model" / "config.json"
    values = json.loads(path.read_text())
    for _ in range(draw.choice((0, 1, 1, 2))):
        _change(draw, values)
    written = json.dumps(values)
    if draw.random() < 0.05:
        written = draw.choice(("[" * 10**5, '{"a":' * 10**5, '{"d_model": ' + "9" * 10**4 + "}", "[0," * 10**6, ""))
    path.write_text(written)
    found = load_weights(folder / "model").model_config
    flags = ("feed_forward_proj", "dense_act_fn", "is_gated_act", "tie_word_embeddings", "scale_decoder_outputs")
    known = {*SIZES, *flags, "is_encoder_decoder", *OTHER_NAMES}
    expected = T5Config(**{name: value for name, value in values.items() if name in known})
    computed = (*SIZES, "feed_forward_proj", "scale_decoder_outputs")
    assert all(getattr(expected, name) == getattr(found, name) for name in computed), "another model"
    activation = found.feed_forward_proj.removeprefix("gated-")
    activation = "gelu_new" if found.feed_forward_proj == "gated-gelu" else activation
    assert (expected.dense_act_fn, expected.is_gated_act) == (activation, found.is_gated)


def _change(draw, values):
    """Change one field of a T5's configuration."""
    kind = draw.randrange(4)
    if kind == 0:
        values[draw.choice([name for name in values if type(values[name]) is int])] = draw.choice(NUMBERS)
    elif kind == 1:
        proj = draw.choice(("relu", "gelu", "gated-gelu", "gated-relu", "silu", "gated-", "", None, 3, "ReLU"))
        values[draw.choice(("feed_forward_proj", "dense_act_fn"))] = proj
    elif kind == 2:
        flags = ("is_gated_act", "tie_word_embeddings", "scale_decoder_outputs", "is_encoder_decoder", "hidden_size")
        values[draw.choice(flags)] = draw.choice((True, False, None, 1, 0, "no", []))
    else:
        changed = mutate_tree(draw, values)
        values.clear()
        values.update(changed if isinstance(changed, dict) else {})


def check_links(draw, folder):
    """Links in place of a run's files: nothing is written to or copied from their targets."""
    parts, model, _ = tiny_run()
    secret, run_dir, tokenizer_dir = folder / "secret", folder / "run", folder / "tokenizer"
    secret.mkdir()
    (secret / "file").write_text(SECRET)
    shutil.copytree(parts / "tokenizer", tokenizer_dir)
    (run_dir / "checkpoints").mkdir(parents=True)
    for name in ("run.lock", "config.json", "metrics.jsonl"):
        (run_dir / name).touch()
    names = [
        "run.lock",
        "metrics.jsonl",
        "config.json",
        "plan.json",
        "samples_rank0.jsonl",
        "best",
        "last",
        "tokenizer",
    ]
    for _ in range(draw.choice((0, 1, 1, 2))):
        home = draw.choice((run_dir, run_dir, tokenizer_dir))
        path = home / draw.choice((*names, "checkpoints", "plots") if home == run_dir else TOKENIZER_FILES)
        _replace_by_link(path, draw.choice((secret / "file", secret, Path("../secret/file"), secret / "absent")))
    try:
        _write_run(run_dir, load_tokenizer(tokenizer_dir), model, draw.random() < 0.3)
    finally:
        assert os.listdir(secret) == ["file"] and (secret / "file").read_text() == SECRET, "written through a link"
    copies = [path for path in run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not copies, f"{copies} contain the text behind a link"


def _replace_by_link(path, target):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    path.symlink_to(target)


def _write_run(run_dir, tokenizer, model, overwrite):
    """Write what a run writes, in the same order."""
    admitted = admit(run_dir, "auto", overwrite)
    with claim(run_dir, admitted, overwrite, tokenizer):
        write_json(run_dir / "config.json", {})
        write_json(run_dir / "plan.json", {})
        cut_sample_ids(run_dir, 0)
        for name in ("metrics.jsonl", "samples_rank0.jsonl"):
            with Journal(run_dir / name) as journal:
                journal.write("sample", step=1, ids=[1])
        export_model(model, tokenizer, run_dir / "best")


def check_printable(draw, folder):
    """A journal with control characters in its texts: the printed text has none of them."""
    texts = ["".join(draw.choices([*CONTROLS, "a", "的", "😀", "\\", "\udc80"], k=9)) for _ in range(4)]
    records = [dict(kind="start", time=1.0, preset=texts[0]), dict(kind="save", step=1, path=texts[1], error=texts[2])]
    records = records[: draw.randrange(1, 3)] + [mutate_tree(draw, record) for record in records]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for record in read_journal(path):
        for value in record.values():
            shown = printable(value if isinstance(value, str) else str(value))
            assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
            shown.encode()  # fails for an unpaired surrogate, which print cannot write
    plain = "".join(character for character in texts[0] if character.isalpha() or character == "😀")
    assert printable(plain) == plain


STRANGERS = {
    "tensors that expand": check_tensors,
    "config.json of a model": check_model_config,
    "links": check_links,
    "control characters": check_printable,
}
