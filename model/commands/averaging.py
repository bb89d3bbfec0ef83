"""The mean of several models of one kind: checkpoints of a run, or Hugging Face directories."""

from dataclasses import dataclass, replace

import torch

from model.data.tokenizer import load_tokenizer
from model.formats.adapters import adapter_directory, export_merged
from model.formats.weights import LoadedWeights, load_weights
from model.nn.registry import config_from
from model.run.checkpoint import read_checkpoint
from model.runtime.json_stream import read_object

SETTINGS = "generation_config.json"


@dataclass(frozen=True)
class MeanWeights:
    """What `export_merged` takes of LoadedWeights: the mean of several, in float32, one tensor at a time."""

    sources: list  # LoadedWeights with tensors of the same names and shapes
    lora = None

    @property
    def model_config(self):
        return self.sources[0].model_config

    @property
    def optimizer(self):
        return self.sources[0].optimizer

    @property
    def tensors(self):
        """The shapes by name, without memory."""
        return {name: torch.empty(t.shape, device="meta") for name, t in self.sources[0].tensors.items()}

    def read(self, name):
        """The mean of the tensors of this name."""
        first, *others = (source.tensors[name] for source in self.sources)
        total = first.to(torch.float32, copy=True)
        for tensor in others:
            total += tensor
        return total.div_(len(self.sources))


def write_average(paths, output):
    """Write the mean of the models at `paths` as a Hugging Face directory; returns its number of weights.

    Tokenizer and generation settings are those of the first. Raises ValueError unless they are two or more of the same
    names, shapes and tokenizer, and `output` is new.
    """
    if len(paths) < 2:
        raise ValueError(f"an average takes two or more models, and {len(paths)} is named: name another")
    if output.exists():
        raise ValueError(f"--output={output} exists already: name another directory")
    sources = [_read(path) for path in paths]
    first = load_tokenizer(sources[0].tokenizer_dir)
    for path, source in zip(paths[1:], sources[1:], strict=True):
        _check_alike(paths[0], sources[0].tensors, path, source.tensors)
        if (other := load_tokenizer(source.tokenizer_dir)).fingerprint != first.fingerprint:
            raise ValueError(
                f"{path} has the tokenizer {other.fingerprint}, and {paths[0]} {first.fingerprint}: average models of "
                "one tokenizer"
            )
    mean = MeanWeights(sources)
    export_merged(mean, first, output, _settings(paths[0]))
    return sum(tensor.numel() for tensor in mean.tensors.values())


def _read(path):
    """LoadedWeights of a run's checkpoint, or of a Hugging Face directory, with the place of their tokenizer."""
    if (path / "state.json").is_file():
        checkpoint = read_checkpoint(path)
        if checkpoint.state.lora:
            raise ValueError(_adapter(path))
        config = config_from(checkpoint.state.shape)
        return LoadedWeights(checkpoint.tensors, config, path.resolve().parents[1] / "tokenizer")
    if adapter_directory(path):
        raise ValueError(_adapter(path))
    weights = load_weights(path)
    if weights.tokenizer_dir is None:
        raise ValueError(f"{path} is a file without its tokenizer: name a Hugging Face directory or a checkpoint")
    return replace(weights, lora=None)


def _adapter(path):
    return (
        f"{path} holds an adapter, and the mean of its factors is not that of what they add: merge each into its base "
        "first (scripts/merge_lora.py)"
    )


def _check_alike(first_path, first, path, tensors):
    """Raise ValueError, with the first tensor that differs, unless both have the same names and shapes."""
    for name in sorted(first.keys() | tensors.keys()):
        shapes = [tuple(side[name].shape) if name in side else "no such tensor" for side in (first, tensors)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{name} is {shapes[0]} in {first_path} and {shapes[1]} in {path}: only models of the same sizes have "
                "an average"
            )


def _settings(path):
    """The generation settings beside a model, or in the exports of a checkpoint's run; empty if there are none."""
    run_dir = path.resolve().parents[1]
    places = [path, path / "best", path / "last", run_dir / "best", run_dir / "last"]
    found = next((place / SETTINGS for place in places if (place / SETTINGS).is_file()), None)
    return read_object(found) if found else {}
