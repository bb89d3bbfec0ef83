"""Parameter names and configuration to and from transformers' T5, mT5 and UMT5; refuses what is not computed here.

transformers 5 ties the output projection to the embedding unless a file holds different ones, whatever
tie_word_embeddings says; that field says whether a T5 scales its decoder's output.
"""

from dataclasses import fields, replace

import torch

from model.nn.given_sizes import PUBLISHED, check_given
from model.nn.t5.sizes import T5ModelConfig

HEAD = "lm_head.weight"
ALIASES = (HEAD, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of shared.weight
UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # in older files; nothing reads it
OTHER_NAMES = dict(
    hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers", head_dim="d_kv"
)
SIZES = tuple(f.name for f in fields(T5ModelConfig) if f.type in (int, float))
CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}  # how transformers' classes begin


def to_hf(model, tokenizer):
    """What config.json and generation_config.json of an exported model say, as two dicts."""
    c = model.config
    ids = dict(
        pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id, decoder_start_token_id=first_id(c, tokenizer)
    )
    scales = dict(scale_decoder_outputs=c.scale_decoder_outputs) if c.model_type == "t5" else {}
    config = {name: getattr(c, name) for name in SIZES} | ids | _feed_forward(c.feed_forward_proj) | scales
    config |= dict(
        model_type=c.model_type, architectures=[f"{CLASSES[c.model_type]}ForConditionalGeneration"], dtype="float32",
        is_encoder_decoder=True, tie_word_embeddings=c.tie_word_embeddings, dropout_rate=model.dropout,
    )  # fmt: skip
    return config, ids


def first_id(model_config, tokenizer):
    """Id that a response begins with."""
    start = model_config.decoder_start_token_id
    return tokenizer.pad_id if start is None else start


def from_hf(tensors, path):
    """`tensors` without copies of the shared embedding.

    Raises ValueError, which names `path`, unless they are those of a T5 whose encoder and decoder share the embedding.
    """
    shared = tensors.get("shared.weight")
    if shared is None:
        raise ValueError(f"{path} has no shared.weight: it is not a T5")
    copies = [alias for alias in ALIASES if alias in tensors and _are_equal(tensors[alias], shared)]
    for alias in ALIASES[1:]:
        if alias in tensors and alias not in copies:
            raise ValueError(f"{path} does not tie {alias} to shared.weight: only a T5 with one embedding can be used")
    return {name: tensor for name, tensor in tensors.items() if name not in (*copies, UNREAD)}


def _are_equal(one, other):
    return one.shape == other.shape and torch.equal(one, other)


def config_with(model_config, tensors):
    """`model_config` with an output projection of its own if `tensors`, those of `from_hf`, hold one."""
    return replace(model_config, tie_word_embeddings=HEAD not in tensors)


def config_of(values, path):
    """T5ModelConfig of the dict `values` of a Hugging Face config.json; raises ValueError for invalid values."""
    if values.get("num_decoder_layers") is None and "num_layers" in values:  # transformers' default
        values["num_decoder_layers"] = values["num_layers"]
    for other, name in OTHER_NAMES.items():
        if other in values and values[other] != values.get(name):
            raise ValueError(
                f"{path} says {other}={values[other]!r:.80} and {name}={values.get(name)!r:.80}: they must be equal"
            )
    try:
        sizes = {name: values[name] for name in SIZES if name in values}
        check_given(T5ModelConfig, sizes)
        model_config = T5ModelConfig(
            **sizes, model_type=values["model_type"],
            feed_forward_proj=_projection(values), scale_decoder_outputs=_scales(values),
            decoder_start_token_id=_start(values),
        )  # fmt: skip
        if not model_config.vocab_size:
            raise ValueError("vocab_size is missing")
        if (model_config.decoder_start_token_id or 0) >= model_config.vocab_size:
            raise ValueError(f"decoder_start_token_id must be below vocab_size={model_config.vocab_size}")
        return model_config
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a T5 configuration: {error!s:.500}: {PUBLISHED}") from None


def _projection(values):
    """feed_forward_proj of a configuration, or transformers' default."""
    return values.get("feed_forward_proj", "relu" if values["model_type"] == "t5" else "gated-gelu")


def _feed_forward(projection):
    """The fields of a configuration that say how a feed-forward works."""
    activation = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    is_gated = projection.startswith("gated-")
    return dict(feed_forward_proj=projection, dense_act_fn=activation, is_gated_act=is_gated)


def _scales(values):
    """Whether transformers scales the decoder's output: T5 as the configuration says, mT5 never, UMT5 always."""
    if values["model_type"] != "t5":
        return values["model_type"] == "umt5"
    tied = values.get("tie_word_embeddings", True)
    scales = values.get("scale_decoder_outputs", tied)
    if not isinstance(tied, bool) or not isinstance(scales, bool):
        said = f"tie_word_embeddings={tied!r:.80}, scale_decoder_outputs={scales!r:.80}"
        raise ValueError(f"{said}: must be true or false")
    return scales


def _start(values):
    """decoder_start_token_id of a configuration, None if it is the pad token."""
    start = values.get("decoder_start_token_id")
    return None if start == values.get("pad_token_id", 0) else start


def check_config(values, path):
    """Raise ValueError if a configuration with these `values`, read by `config_of`, asks for what is not computed."""
    computed = _feed_forward(_projection(values)) | dict(tie_encoder_decoder=False, is_encoder_decoder=True)
    for name, value in computed.items():
        if values.get(name, value) != value:
            raise ValueError(f"{path} says {name}={values[name]!r:.80}: only a T5 with {name}={value!r} can be used")
    for name in ("quantization_config", "pruned_heads"):
        if values.get(name):
            raise ValueError(f"{path} says {name}={values[name]!r:.80}: only a T5 without it can be used")
