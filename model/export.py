"""Weights in and out: ordinary Hugging Face T5 directories, run directories and old .bin files."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from config import T5ModelConfig
from model.durable import whole_directory
from model.json_items import read_object
from model.tokenizer import copy_tokenizer

SAFE_LOAD = (2, 10)  # the first torch whose weights_only=True keeps its promise
ALIASES = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of shared.weight


def as_hugging_face(model, tokenizer, device=None):
    """transformers' T5ForConditionalGeneration to evaluate, on the tensors of `model`, or on copies on `device`."""
    from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration  # seconds that no first step needs
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ids = dict(pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id, decoder_start_token_id=tokenizer.pad_id)
    shape = {f.name: getattr(model.shape, f.name) for f in fields(T5ModelConfig)}
    config = T5Config(**shape, **ids, dropout_rate=model.dropout, feed_forward_proj="relu", tie_word_embeddings=True)
    with torch.device("meta"):
        stock = T5ForConditionalGeneration(config)
    weights = {name: tensor.detach().to(device) for name, tensor in model.state_dict().items()}
    weights |= {alias: weights["shared.weight"] for alias in ALIASES}
    stock.load_state_dict(weights, assign=True)
    stock.generation_config = GenerationConfig(**ids)
    return stock.eval()


def export_model(model, tokenizer, directory):
    """Write an ordinary Hugging Face directory, tokenizer included; `directory` is whole at every moment.

    Raises OSError when the disk fails.
    """
    with whole_directory(directory) as draft:
        try:
            # on the host: transformers copies tensors that share their storage, for which a GPU may have no room
            as_hugging_face(model, tokenizer, "cpu").save_pretrained(draft)
        except SafetensorError as error:  # how this library says that the disk failed
            raise OSError(f"{directory} cannot be written: {error}") from None
        copy_tokenizer(tokenizer.directory, draft)


@dataclass(frozen=True)
class Weights:
    """What a checkpoint holds: tensors by Hugging Face name, the shape and the tokenizer's place where it tells."""

    tensors: dict
    shape: T5ModelConfig | None
    tokenizer_dir: Path | None


def load_weights(path):
    """Weights of a Hugging Face directory, a run directory (its best/, else last/) or a .bin state dict.

    Raises ValueError when `path` is none of these or not a T5 v1.0. Never runs code from a file.
    """
    path = Path(path)
    if path.is_file():
        return Weights(_canonical(_read_tensors(path), path), None, None)
    for directory in (path, path / "best", path / "last"):
        if (directory / "config.json").is_file() and (directory / "model.safetensors").is_file():
            tensors = _canonical(_read_tensors(directory / "model.safetensors"), directory)
            return Weights(tensors, _read_shape(directory / "config.json"), directory)
    raise ValueError(
        f"finetune_from_ckp_file={path}: no model there; name a Hugging Face directory (config.json and "
        "model.safetensors), a run directory with best/, or a .bin file"
    )


def _read_tensors(path):
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_LOAD:
            raise ValueError("torch before 2.10 can be made to run code by such a file (CVE-2026-24747): upgrade it")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from None
    except Exception as error:  # torch.load raises pickle's own error, which this project does not import
        raise ValueError(f"{path} is not a plain state dict and is refused: {type(error).__name__}") from None
    if not isinstance(tensors, dict) or not all(isinstance(v, torch.Tensor) for v in tensors.values()):
        raise ValueError(
            f"{path} is not a state dict of tensors: give the file that torch.save(model.state_dict()) wrote"
        )
    return tensors


def _canonical(tensors, path):
    """`tensors` under our names: wrappers' prefixes off, aliases of the shared embedding dropped, float32."""
    for prefix in ("module.", "_orig_mod.", "model."):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    shared = tensors.get("shared.weight")
    if shared is None:
        raise ValueError(f"{path} holds no shared.weight: it is not a T5")
    if any("wi_0" in name for name in tensors):
        raise ValueError(
            f"{path} is a gated T5 (v1.1 or flan): only T5 v1.0 with one ReLU feed-forward can be trained here"
        )
    head = tensors.get("lm_head.weight", shared)
    if head.shape != shared.shape or not torch.equal(head, shared):
        raise ValueError(f"{path} has an output layer of its own: only a T5 with tied embeddings can be trained here")
    return {name: tensor.float() for name, tensor in tensors.items() if name not in ALIASES}


def _read_shape(path):
    """T5ModelConfig in a Hugging Face config.json."""
    values = read_object(path)
    if values.get("model_type") != "t5":
        raise ValueError(f"{path} says model_type={values.get('model_type')!r}: only t5 can be trained here")
    try:
        return T5ModelConfig(**{f.name: values[f.name] for f in fields(T5ModelConfig) if f.name in values})
    except TypeError as error:
        raise ValueError(f"{path} is not a T5 configuration: {error}") from None


def load_into(model, weights, source):
    """Copy `weights.tensors` into `model`; raises ValueError naming what does not fit."""
    check_fits(model, weights, source)
    model.load_state_dict(weights.tensors)


def check_fits(model, weights, source):
    """Raise ValueError, naming what does not fit, unless `weights.tensors` are those of `model` in name and shape."""
    own = model.state_dict()
    missing, extra = own.keys() - weights.tensors.keys(), weights.tensors.keys() - own.keys()
    wrong = [n for n in own.keys() & weights.tensors.keys() if own[n].shape != weights.tensors[n].shape]
    if missing or extra or wrong:
        shapes = [f"{n}: {tuple(weights.tensors[n].shape)} there, {tuple(own[n].shape)} here" for n in wrong[:3]]
        raise ValueError(
            f"{source} does not fit this model: {len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape; {'; '.join([*shapes, *sorted(missing)[:3], *sorted(extra)[:3]])}; "
            "a .bin file does not tell its shape: name it in --model"
        )
