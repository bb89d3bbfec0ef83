"""The families by name, which is the model_type of their Hugging Face configurations."""

import json
from dataclasses import asdict, fields

from config import DEFAULT_FAMILY, MAX_JSON_BYTES, MODELS
from model.nn.decoder.family import DECODER
from model.nn.decoder.sizes import DECODER_TYPES
from model.nn.given_sizes import check_given
from model.nn.t5.family import T5
from model.nn.t5.sizes import T5_TYPES

FAMILIES = dict.fromkeys(T5_TYPES, T5) | dict.fromkeys(DECODER_TYPES, DECODER)
# all that a Qwen from scratch needs; its other sizes have defaults
QWEN = json.dumps(
    dict(family="qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8)
)


def family_named(name):
    """The Family of this name; raises ValueError for an unknown one."""
    if name not in FAMILIES:
        raise ValueError(f"the family {name!r:.80} is not known: only {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(model_config):
    """The Family of a model configuration."""
    return next(family for family in FAMILIES.values() if isinstance(model_config, family.config_class))


def config_values(model_config):
    """Plain values of a model configuration, the family's name among them, for `config_from`."""
    return dict(family=family_of(model_config).name) | asdict(model_config)


def config_from(values):
    """The model configuration with these plain values; without a family's name, of the family DEFAULT_FAMILY.

    Raises ValueError or TypeError for values that it cannot have.
    """
    values = dict(values)
    name = values.pop("family", DEFAULT_FAMILY)
    config_class = family_named(name).config_class
    known = [field.name for field in fields(config_class)]
    if unknown := values.keys() - known:
        raise ValueError(f"{', '.join(map('{!r:.80}'.format, sorted(unknown)))}: known are {', '.join(known)}")
    check_given(config_class, values)
    variant = dict(model_type=name) if "model_type" in known else {}
    return config_class(**variant | values)


def load_model_config(name):
    """Model configuration of a named size or a JSON file; raises ValueError if the file cannot be read as one."""
    if name in MODELS:
        return config_from(MODELS[name])
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES:,} characters")
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
        return config_from(values)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        example = json.dumps(MODELS["small"])
        raise ValueError(
            f"model={name!r} cannot be read ({error}): write a JSON object like {example}, or for a Qwen {QWEN}"
        ) from None
