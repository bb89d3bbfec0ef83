"""Parameter names and configuration to and from transformers' Qwen2, Qwen3 and Llama; refuses what is not computed."""

from dataclasses import fields, replace

import torch

from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.given_sizes import PUBLISHED, check_given

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}  # how transformers' classes begin
SIZES = tuple(f.name for f in fields(DecoderModelConfig) if f.name not in ("model_type", "rope_theta", "rope_scaling"))
# transformers' defaults, where they differ from ours
DEFAULTS = dict(
    qwen2=dict(num_key_value_heads=32), qwen3=dict(num_key_value_heads=32, head_dim=128),
    llama=dict(max_position_embeddings=2048),
)  # fmt: skip
DEFAULT_THETA = 10_000.0
PARTIAL = "partial_rotary_factor"
ONLY = dict(
    hidden_act="silu", attention_bias=False, mlp_bias=False, attention_dropout=0, partial_rotary_factor=1,
    pretraining_tp=1,
)  # fmt: skip


def to_hf(model, tokenizer):
    """What config.json and generation_config.json of an exported model say, as two dicts."""
    c, ids = model.config, dict(pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id)
    config = {name: getattr(c, name) for name in SIZES} | ids
    config |= dict(
        model_type=c.model_type, architectures=[f"{CLASSES[c.model_type]}ForCausalLM"], dtype="float32",
        hidden_act="silu", attention_bias=False, attention_dropout=0.0, use_cache=True, rope_scaling=None,
    )  # fmt: skip
    if c.model_type != "llama":
        config |= dict(use_sliding_window=False, sliding_window=None, max_window_layers=c.num_hidden_layers)
    return config | rotary_values(c), ids


def rotary_values(model_config):
    """The fields of config.json on rotary positions: as transformers 5 reads them, and as transformers 4 does."""
    theta, scaling = model_config.rope_theta, dict(model_config.rope_scaling)
    values = dict(rope_parameters=dict(rope_type="default", rope_theta=theta) | scaling, rope_theta=theta)
    return values | (dict(rope_scaling=scaling) if scaling else {})


def config_of(values, path):
    """DecoderModelConfig of the dict `values` of a Hugging Face config.json; raises ValueError for invalid values."""
    known = DEFAULTS[values["model_type"]] | {name: x for name in SIZES if (x := values.get(name)) is not None}
    if values.get("num_key_value_heads", 0) is None:
        known.pop("num_key_value_heads", None)
    try:
        check_given(DecoderModelConfig, known)
        scaling = dict(_rotary(values))
        theta = scaling.pop("rope_theta", values.get("rope_theta", DEFAULT_THETA))
        theta = float(theta) if isinstance(theta, int) else theta
        scaling = {dict(type="rope_type").get(name, name): x for name, x in scaling.items() if name != PARTIAL}
        rotary = dict(rope_theta=theta, rope_scaling=scaling)
        model_config = DecoderModelConfig(**known | rotary, model_type=values["model_type"])
        if not model_config.vocab_size:
            raise ValueError("vocab_size is missing")
        return model_config
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a decoder's configuration: {error!s:.500}: {PUBLISHED}") from None


def _rotary(values):
    """The settings of the rotary positions, {} if there are none."""
    settings = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ValueError(f"rope_parameters={settings!r:.80} must be an object")
    return settings


def check_config(values, path):
    """Raise ValueError if a configuration with these `values`, read by `config_of`, asks for what is not computed."""
    rotary = _rotary(values)
    computed = {name: (values.get(name, value), value) for name, value in ONLY.items()}
    computed["rope_parameters' partial_rotary_factor"] = rotary.get(PARTIAL, 1), 1
    layers = values.get("layer_types") or []
    other = [kind for kind in layers if kind != "full_attention"] if isinstance(layers, list) else [layers]
    computed["layer_types"] = (other or ["full_attention"])[0], "full_attention"
    computed["use_sliding_window"] = (
        bool(values.get("use_sliding_window")) and bool(values.get("sliding_window")),
        False,
    )
    for name, (said, value) in computed.items():
        if said != value:
            raise ValueError(f"{path} says {name}={said!r:.80}: only a decoder with {name}={value!r} can be used")
    if values.get("quantization_config"):
        raise ValueError(
            f"{path} says quantization_config={values['quantization_config']!r:.80}: only weights that are not "
            "quantized can be read; take the model's ordinary weights"
        )


def config_with(model_config, tensors):
    """`model_config` with an output projection of its own if `tensors`, those of `from_hf`, hold one."""
    return replace(model_config, tie_word_embeddings=HEAD not in tensors)


def from_hf(tensors, path):
    """`tensors` under the network's names, without a copy of the embedding.

    Raises ValueError, which names `path`, unless they are those of a decoder.
    """
    named = {name if name == HEAD else f"model.{name.removeprefix('model.')}": x for name, x in tensors.items()}
    embedding, head = named.get(EMBEDDING), named.get(HEAD)
    if embedding is None:
        raise ValueError(f"{path} has no {EMBEDDING}: it is not a decoder")
    if head is not None and head.shape == embedding.shape and torch.equal(head, embedding):
        del named[HEAD]
    return named
