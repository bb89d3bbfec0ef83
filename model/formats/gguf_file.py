"""Writes a decoder as a GGUF file, which llama.cpp and what is built on it read: sizes, tokenizer, weights.

One tensor after the other is read, turned into the file's type and written. Vectors stay float32, as llama.cpp has
them.
"""

import math

import numpy as np
import torch

from model.nn.decoder.rotary import scaled_frequencies

TYPES = ("f32", "f16", "bf16", "q8_0")
MAX_F16 = 65504
BLOCK = 32  # numbers of a row that share a scale in q8_0
ROPE_FACTORS = "rope_freqs.weight"


def gguf_package():
    """The package `gguf`; raises RuntimeError with what to type if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise RuntimeError("the package gguf is not installed: pip install -e '.[gguf]'") from None
    return gguf


def write_gguf(path, weights, vocabulary, settings, kind, name):
    """Write LoadedWeights of a decoder and its GgufVocabulary to a GGUF file; `kind` is one of TYPES.

    `settings` is a dict(template, ends): the chat template and the ids that end an answer. `name` is the model's.
    Raises ValueError for a tokenizer, positions or weights that such a file cannot hold.
    """
    gguf, c = gguf_package(), weights.model_config
    rules, factors = vocabulary.rules, _rope_factors(c)  # refusals come before the file
    writer = gguf.GGUFWriter(path, c.model_type)
    try:
        _add_sizes(gguf, writer, c, kind, name)
        _add_positions(gguf, writer, c)
        _add_vocabulary(writer, vocabulary, rules, settings)
        names = _tensor_names(gguf, c, weights.tensors)
        for theirs, ours in names.items():
            _announce(gguf, writer, ours, weights.tensors[theirs].shape, kind)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for theirs in names:
            writer.write_tensor_data(_stored(gguf, c, theirs, weights.read(theirs), kind))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()


def _add_sizes(gguf, writer, c, kind, name):
    kinds = dict(zip(TYPES, ("ALL_F32", "MOSTLY_F16", "MOSTLY_BF16", "MOSTLY_Q8_0"), strict=True))
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[kinds[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(c.vocab_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)


def _add_positions(gguf, writer, c):
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    scaling = dict(c.rope_scaling)
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(
            int(scaling.get("original_max_position_embeddings", c.max_position_embeddings))
        )
        writer.add_rope_scaling_yarn_beta_fast(scaling.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(scaling.get("beta_slow", 1.0))
        _, factor = scaled_frequencies(c, torch.device("cpu"))
        usual = 0.1 * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0  # llama.cpp's own
        if not math.isclose(factor, usual):
            writer.add_rope_scaling_attn_factors(factor / usual)


def _rope_factors(c):
    """What divides the frequency of each pair of a head, of Llama 3's scaling, which stands among the tensors."""
    if dict(c.rope_scaling).get("rope_type") != "llama3":
        return None
    if c.model_type != "llama":
        raise ValueError(f"rope_type=llama3 in a {c.model_type}: llama.cpp reads it for model_type=llama alone")
    frequencies, _ = scaled_frequencies(c, torch.device("cpu"))
    powers = torch.arange(0, c.head_dim, 2).float() / c.head_dim
    return (1.0 / c.rope_theta**powers / frequencies).numpy().astype(np.float32)


def _add_vocabulary(writer, vocabulary, rules, settings):
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(rules)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos_id)
    add_ends = writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id
    for add, number in zip(add_ends, settings["ends"], strict=False):
        add(number)
    writer.add_pad_token_id(vocabulary.tokenizer.pad_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_chat_template(settings["template"])


def _tensor_names(gguf, c, tensors):
    """{name of each tensor: its name in the file}."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == c.model_type)
    known = gguf.get_tensor_name_map(arch, c.num_hidden_layers)
    return {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors}


def _type_of(gguf, shape, kind):
    """The type in which a tensor of this shape is stored."""
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and shape[-1] % BLOCK:
        kind = "f16"
    return gguf.GGMLQuantizationType[kind.upper()]


def _announce(gguf, writer, name, shape, kind):
    """Tell the writer of a tensor that is written later."""
    stored = _type_of(gguf, shape, kind)
    block, size = gguf.GGML_QUANT_SIZES[stored]
    num_bytes = math.prod(shape) // block * size
    writer.add_tensor_info(name, tuple(shape), np.dtype(np.float32), num_bytes, stored)


def _stored(gguf, c, name, tensor, kind):
    """The bytes of a tensor, as an array; raises ValueError for numbers that the type cannot hold."""
    if c.model_type == "llama" and ".self_attn.q_proj." in name:
        tensor = _interleaved(tensor, c.num_attention_heads)
    if c.model_type == "llama" and ".self_attn.k_proj." in name:
        tensor = _interleaved(tensor, c.num_key_value_heads)
    stored = _type_of(gguf, tensor.shape, kind)
    if stored.name == "F16" and MAX_F16 < tensor.abs().max() < math.inf:
        raise ValueError(f"{name} has a number of {tensor.abs().max():.3g}, and f16 holds up to {MAX_F16}: --type bf16")
    return gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)


def _interleaved(tensor, num_heads):
    """Rows of q or k in llama.cpp's order for a llama: the two of a pair, which rotate together, are neighbours."""
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
