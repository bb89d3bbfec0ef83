"""Parameter names and configuration to and from transformers' T5; refuses what this network does not compute."""

from dataclasses import fields

import torch

from config import T5ModelConfig

ALIASES = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of shared.weight
# Fields of transformers' T5Config, besides sizes, that change what is computed, with the values supported here.
COMPUTED = dict(
    feed_forward_proj="relu", dense_act_fn="relu", is_gated_act=False, scale_decoder_outputs=True,
    tie_word_embeddings=True, tie_encoder_decoder=False, is_encoder_decoder=True,
)  # fmt: skip
OTHER_NAMES = dict(
    hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers", head_dim="d_kv"
)


def as_hugging_face(model, tokenizer, device=None):
    """transformers' T5ForConditionalGeneration in evaluation mode, sharing the float32 weights of `model`.

    Holds copies instead of weights on another `device`, or of another dtype.
    """
    # imported here because it takes seconds, which the first step need not wait for
    from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ids = dict(pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id, decoder_start_token_id=tokenizer.pad_id)
    model_config = {f.name: getattr(model.config, f.name) for f in fields(T5ModelConfig)}
    config = T5Config(
        **model_config, **ids, dropout_rate=model.dropout, feed_forward_proj="relu", tie_word_embeddings=True
    )
    with torch.device("meta"):
        hf_model = T5ForConditionalGeneration(config)
    weights = {name: tensor.detach().to(device).float() for name, tensor in model.state_dict().items()}
    weights |= {alias: weights["shared.weight"] for alias in ALIASES}
    hf_model.load_state_dict(weights, assign=True)
    hf_model.generation_config = GenerationConfig(**ids)
    return hf_model.eval()


def own_tensors(tensors, path):
    """`tensors` as float32, without the aliases of the shared embedding.

    Raises ValueError unless they are those of a T5 v1.0 with tied embeddings; `path` is named in it.
    """
    shared = tensors.get("shared.weight")
    if shared is None:
        raise ValueError(f"{path} has no shared.weight: it is not a T5")
    if any("wi_0" in name for name in tensors):
        raise ValueError(
            f"{path} is a gated T5 (v1.1 or flan): only T5 v1.0 with one ReLU feed-forward can be trained here"
        )
    for alias in ALIASES:
        other = tensors.get(alias, shared)
        if other.shape != shared.shape or not torch.equal(other, shared):
            raise ValueError(
                f"{path} does not tie {alias} to shared.weight: only a T5 with tied embeddings can be trained here"
            )
    return {name: tensor.float() for name, tensor in tensors.items() if name not in ALIASES}


def config_of(values, path):
    """T5ModelConfig of the dict `values` of a Hugging Face config.json; raises ValueError for invalid values."""
    if values.get("num_decoder_layers") is None and "num_layers" in values:  # transformers' default
        values["num_decoder_layers"] = values["num_layers"]
    for other, name in OTHER_NAMES.items():
        if other in values and values[other] != values.get(name):
            raise ValueError(
                f"{path} says {other}={values[other]!r:.80} and {name}={values.get(name)!r:.80}: they must be equal"
            )
    for name, computed in COMPUTED.items():
        if not isinstance(values.get(name, computed), type(computed)):
            raise ValueError(f"{path} says {name}={values[name]!r:.80}: it must be a {type(computed).__name__}")
    try:
        model_config = T5ModelConfig(**{f.name: values[f.name] for f in fields(T5ModelConfig) if f.name in values})
        if not model_config.vocab_size:
            raise ValueError("vocab_size is missing")
        return model_config
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a T5 configuration: {error!s:.500}") from None


def check_config(values, path):
    """Raise ValueError if a T5Config with these `values` differs from what this network computes."""
    for name, computed in COMPUTED.items():
        if values.get(name, computed) != computed:
            raise ValueError(
                f"{path} says {name}={values[name]!r:.80}: only a T5 v1.0 with {name}={computed!r} can be trained here"
            )
    for name in ("quantization_config", "pruned_heads"):
        if values.get(name):
            raise ValueError(f"{path} says {name}={values[name]!r:.80}: only a T5 without it can be trained here")
    start, pad = values.get("decoder_start_token_id"), values.get("pad_token_id", 0)
    if start not in (None, pad):
        raise ValueError(
            f"{path} says decoder_start_token_id={start!r:.80} and pad_token_id={pad!r:.80}: only a T5 whose answers "
            "begin with the pad token can be trained here"
        )
