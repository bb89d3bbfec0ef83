"""Reads weights from Hugging Face directories, run directories and .bin files; exports Hugging Face directories."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from config import DEFAULT_FAMILY, MAX_JSON_BYTES
from model.data.chat_template import write_chat_template
from model.data.tokenizer import copy_tokenizer, keep_own_class
from model.data.turn_template import write_turn_template
from model.formats.carried import RECORD, config_values, generation_values, write_json
from model.formats.model_card import CARD_FILE, CardFacts, model_card, optimizer_of_card
from model.formats.tensor_files import read_tensors
from model.nn.lora import LoraConfig, is_factor, merged
from model.nn.registry import FAMILIES, family_named, family_of
from model.runtime.atomic_io import whole_directory
from model.runtime.json_stream import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DECODER_TENSOR = "embed_tokens.weight"  # that every decoder has and no T5
MAX_CARD_CHARACTERS = 2**16  # of a model card, that are read
FILE_NAME = re.compile(r"[\w-][\w.-]{0,200}\.safetensors")  # in INDEX: no folder, and nothing hidden


def export_model(model, tokenizer, directory, generation=None, facts=None, weights_files=(), base=None):
    """Write a Hugging Face directory, tokenizer and model card included, in place of `directory` atomically.

    `generation` is a dict of values for its generation_config.json, beside the ids that the family writes there; its
    `prefix` stands before each question. `facts` are the CardFacts of its README.md. Of `weights_files`
    the first that exists has these weights: it is linked to, and they are not written again. `base` is a directory with
    the configurations of the model that was trained on, which are kept but for what training changed. Raises OSError if
    the directory cannot be written.
    """
    with whole_directory(directory) as draft:
        try:
            write_card(write_model(model, tokenizer, draft, generation, weights_files, base), draft, facts)
            write_record(draft, facts.optimizer if facts else "")
        except SafetensorError as error:  # safetensors raises it for a full or failing disk
            raise OSError(f"{directory} cannot be written: {error}") from None
        add_tokenizer(family_of(model.config), tokenizer, draft, (generation or {}).get("prefix", ""))


def write_card(values, directory, facts=None):
    """Write the model card of a network whose config.json says `values`."""
    card = model_card(facts or CardFacts(), values["model_type"], values.get("is_encoder_decoder", False))
    (directory / CARD_FILE).write_text(card, encoding="utf-8", errors="replace")


def write_record(directory, optimizer):
    """Write to config.json which of this trainer's optimizers trained all of the weights last, if any did."""
    if optimizer:
        add_values(directory / "config.json", {RECORD: dict(optimizer=optimizer)})


def read_record(directory, values):
    """The optimizer of this trainer that trained all weights of a Hugging Face directory last; "" if none did.

    `values` are those of its config.json. Exports without a record name the optimizer in their card, and those without
    a card in the config.json of the run that holds them.
    """
    record = values.get(RECORD)
    if isinstance(record, dict):
        return str(record.get("optimizer", ""))
    if (card := directory / CARD_FILE).is_file():
        with open(card, encoding="utf-8", errors="replace") as file:
            return optimizer_of_card(file.read(MAX_CARD_CHARACTERS))
    return _optimizer_of_run(directory.resolve())


def _optimizer_of_run(directory):
    """The optimizer in the config.json of the run whose best/ or last/ this is; "" if that says none."""
    run = directory.parent / "config.json"
    if directory.name not in ("best", "last") or not run.is_file():
        return ""
    with suppress(ValueError, KeyError, TypeError):
        return str(read_object(run)["config"]["optimizer"])
    return ""


def add_tokenizer(family, tokenizer, directory, prefix=""):
    """Copy a tokenizer's files and its chat template to `directory`; raises OSError if that fails."""
    try:
        copy_tokenizer(tokenizer.directory, directory)
        if family.reads_dialogues:
            write_turn_template(tokenizer, directory)
        else:
            write_chat_template(tokenizer, directory, prefix)
        keep_own_class(tokenizer, directory)
    except ValueError as error:  # the tokenizer was changed during the run; the next export may succeed
        raise OSError(str(error)) from None


def add_values(path, values):
    """Add `values` to the JSON object in a file, which is made if there is none."""
    known = read_object(path) if path.is_file() else {}
    write_json(path, known | values)


def write_model(model, tokenizer, directory, generation=None, weights_files=(), base=None):
    """Write a model's configuration, its float32 weights and its generation_config.json into `directory`.

    Returns the configuration's values. Arguments are those of export_model. Needs no transformers, whose import takes
    seconds.
    """
    values = write_values(model, tokenizer, directory, generation, base=base)
    file = directory / WEIGHTS
    if not any(_link(existing, file) for existing in weights_files):
        tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in model.state_dict().items()}
        write_tensors(tensors, file)
    return values


def write_values(model, tokenizer, directory, generation=None, dtype="float32", base=None):
    """Write config.json, for weights of this dtype, and generation_config.json; returns the values of the first."""
    values = config_values(model, tokenizer, dtype, base)
    write_json(directory / "config.json", values)
    write_json(directory / "generation_config.json", generation_values(model, tokenizer, generation or {}, base))
    return values


def write_tensors(tensors, path):
    """Write a safetensors file that transformers reads too."""
    save_file(tensors, path, dict(format="pt"))


def _link(existing, path):
    """Whether `path` could be made another name of the file `existing`; not every file system has hard links."""
    try:
        os.link(existing, path)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class LoadedWeights:
    """Tensors by Hugging Face name, with model configuration and tokenizer directory; a .bin file holds neither."""

    tensors: dict
    model_config: object = None  # of its family's config_class; None: unknown
    tokenizer_dir: Path | None = None
    lora: LoraConfig | None = None  # of an adapter that `read` adds
    factors: dict = field(default_factory=dict)  # its tensors
    optimizer: str = ""  # of this trainer, that trained all of `tensors` last; "": none did, or unknown

    def read(self, name):
        """The tensor of this name; one with factors is made now, in float32, so that few exist at a time."""
        return merged(name, self.tensors[name], self.factors, self.lora)


def load_weights(path):
    """LoadedWeights of a Hugging Face directory, a run directory (its best/, else its last/) or a .bin state dict.

    Raises ValueError if `path` is none of these or no network that a family computes. Runs no code from the file; time
    and memory are bounded by the size of the file.
    """
    path = Path(path)
    if path.is_file():
        family, optimizer = _made_beside(path)
        tensors = read_tensors(path)
        if family is family_named(DEFAULT_FAMILY) and DECODER_TENSOR in tensors:
            raise ValueError(
                f"{path} holds a decoder's weights without its config.json: give a Hugging Face directory with both "
                "(MiniMind's scripts/convert_model.py writes one)"
            )
        return LoadedWeights(family.from_hf(tensors, path), optimizer=optimizer)
    directory = model_directory(path)
    if directory is None:
        raise ValueError(
            f"finetune_from_ckp_file={path}: no model there; give a Hugging Face directory (config.json and "
            "model.safetensors), a run directory with best/, or a .bin file"
        )
    family, model_config, values = read_config(directory / "config.json")
    family.check_config(values, directory / "config.json")
    tensors = family.from_hf(_read_files(directory), directory)
    if model_config.num_blocks > len(tensors):  # before so deep a model is built
        raise ValueError(f"{directory} does not fit its config.json: {len(tensors)} tensors for {model_config}")
    optimizer = read_record(directory, values)
    return LoadedWeights(tensors, family.config_with(model_config, tensors), directory, optimizer=optimizer)


def _read_files(directory):
    """{name: tensor} of a directory's one file of weights, or of the files that its INDEX names.

    They are mapped from the files: a tensor takes memory once it is read, which the system takes back. Raises
    ValueError as `read_tensors` does, and if the index does not fit the files.
    """
    if single := weights_file(directory):
        return read_tensors(single)
    named, tensors = read_object(directory / INDEX).get("weight_map"), {}
    if not isinstance(named, dict) or not all(isinstance(x, str) and FILE_NAME.fullmatch(x) for x in named.values()):
        raise ValueError(f"{directory / INDEX}: its weight_map must name files beside it, NAME.safetensors")
    for name in sorted(set(named.values())):
        if not (directory / name).is_file():
            raise ValueError(f"{directory / INDEX} names {name}, and it is not there: download it too")
        tensors |= read_tensors(directory / name)
    if len(tensors) != len(named):
        raise ValueError(f"{directory / INDEX} names {len(named)} tensors and its files hold {len(tensors)}")
    return tensors


def read_config(path):
    """(Family, model configuration, dict of all fields) of a Hugging Face config.json.

    Raises ValueError for an unknown model type and invalid values.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is too large for a model configuration: at most {MAX_JSON_BYTES:,} bytes are read")
    values = read_object(path)
    family = FAMILIES.get(values.get("model_type")) if isinstance(values.get("model_type"), str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{path} says model_type={values.get('model_type')!r:.80}: only {known} is supported")
    return family, family.config_of(values, path), values


def _made_beside(path):
    """(Family, `read_record`) of a file of weights by a config.json in the same Hugging Face directory.

    (DEFAULT_FAMILY, "") without one.
    """
    config_path = path.with_name("config.json")
    if path.name in ("pytorch_model.bin", "model.safetensors") and config_path.is_file():
        family, _, values = read_config(config_path)
        family.check_config(values, config_path)
        return family, read_record(path.parent, values)
    return family_named(DEFAULT_FAMILY), ""


def model_directory(path):
    """The first of `path`, its best/ and its last/ that holds weights in Hugging Face form, or None."""
    path = Path(path)
    for directory in (path, path / "best", path / "last"):
        if (directory / "config.json").is_file() and (weights_file(directory) or (directory / INDEX).is_file()):
            return directory
    return None


def weights_file(directory):
    """The file of weights in a Hugging Face directory, or None; older models come as a pickled state dict."""
    paths = (Path(directory, name) for name in (WEIGHTS, "pytorch_model.bin"))
    return next((path for path in paths if path.is_file()), None)


def load_into(model, weights, source):
    """Copy LoadedWeights into `model`, one by one. Raises ValueError as `check_fits` does; `source` is named in it."""
    check_fits(model, weights, source)
    packed = {name: p.packed for name, p in model.named_parameters() if hasattr(p, "packed")}
    others = model.state_dict()
    for name in weights.tensors:  # either the adapters or all but them
        if name in packed:
            packed[name].write(weights.read(name))
        else:
            others[name].copy_(weights.read(name))


def check_fits(model, weights, source):
    """Raise ValueError with the differences unless `weights.tensors` match `model` in names and shapes."""
    of_adapter = any(map(is_factor, weights.tensors))
    expected = {name: tensor for name, tensor in model.state_dict().items() if is_factor(name) == of_adapter}
    missing, extra = expected.keys() - weights.tensors.keys(), weights.tensors.keys() - expected.keys()
    wrong = [n for n in expected.keys() & weights.tensors.keys() if expected[n].shape != weights.tensors[n].shape]
    if missing or extra or wrong:
        shapes = [f"{n}: {tuple(weights.tensors[n].shape)} there, {tuple(expected[n].shape)} here" for n in wrong[:3]]
        raise ValueError(
            f"{source} does not fit this model: {len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape; {'; '.join([*shapes, *sorted(missing)[:3], *sorted(extra)[:3]])}"
            + ("; a .bin file holds no model configuration: give it with --model" if Path(source).is_file() else "")
        )
