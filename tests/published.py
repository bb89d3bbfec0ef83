"""Directories as published on the Hub, tiny, with every field of the real config.json and generation_config.json."""

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.data.files import save_unigram, write_json
from tests.data.qwen_tokenizer import make_qwen_tokenizer

TEXT = "你好 how are you"
ASKED = [dict(role="user", content=TEXT)]
QWEN = dict(
    attention_dropout=0.0, hidden_act="silu", hidden_size=16, initializer_range=0.02, intermediate_size=32,
    max_window_layers=1, num_attention_heads=4, num_hidden_layers=2, rms_norm_eps=1e-6, torch_dtype="bfloat16",
    use_cache=True, use_sliding_window=False,
)  # fmt: skip
T5 = dict(
    d_ff=32, d_kv=8, d_model=16, decoder_start_token_id=0, dropout_rate=0.1, eos_token_id=1, initializer_factor=1.0,
    is_encoder_decoder=True, layer_norm_epsilon=1e-6, num_heads=2, num_layers=2, num_decoder_layers=2,
    output_past=True, pad_token_id=0, relative_attention_num_buckets=32, tie_word_embeddings=False,
    feed_forward_proj="gated-gelu",
)  # fmt: skip
CONFIGS = dict(
    qwen15=QWEN | dict(
        architectures=["Qwen2ForCausalLM"], max_position_embeddings=32768, model_type="qwen2", num_key_value_heads=4,
        rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, transformers_version="4.37.0",
    ),
    qwen25=QWEN | dict(
        architectures=["Qwen2ForCausalLM"], max_position_embeddings=32768, model_type="qwen2", num_key_value_heads=2,
        rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=False, transformers_version="4.43.1",
    ),
    qwen3=QWEN | dict(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, head_dim=8, max_position_embeddings=40960,
        model_type="qwen3", num_key_value_heads=2, rope_scaling=None, rope_theta=1000000, sliding_window=None,
        tie_word_embeddings=True, transformers_version="4.51.0",
    ),
    t5v11=T5 | dict(architectures=["T5ForConditionalGeneration"], model_type="t5"),
    mt5=T5 | dict(architectures=["MT5ForConditionalGeneration"], model_type="mt5", tokenizer_class="T5Tokenizer"),
)  # fmt: skip
# of chat models, of a base (Qwen2.5's) that ends texts and not turns, and of T5s
CHAT = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
BASE = dict(do_sample=False, max_new_tokens=2048)
DERIVED = dict(_from_model_config=True, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)


# fields of the published Qwen3's tokenizer_config.json, and names of its tensors, with N for a layer's number
QWEN3_TOKENIZER = dict(
    add_bos_token=False, add_prefix_space=False, added_tokens_decoder={"151643": dict(content="<|endoftext|>")},
    additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|object_ref_start|>"], bos_token=None,
    chat_template="{%- if tools %}", clean_up_tokenization_spaces=False,
    eos_token="<|im_end|>", errors="replace", model_max_length=131072, pad_token="<|endoftext|>",
    split_special_tokens=False, tokenizer_class="Qwen2Tokenizer", unk_token=None,
)  # fmt: skip
QWEN3_LAYER = (
    "input_layernorm mlp.down_proj mlp.gate_proj mlp.up_proj post_attention_layernorm self_attn.k_norm "
    "self_attn.k_proj self_attn.o_proj self_attn.q_norm self_attn.q_proj self_attn.v_proj"
)
QWEN3_TENSORS = {"model.embed_tokens.weight", "model.norm.weight"} | {
    f"model.layers.N.{name}.weight" for name in QWEN3_LAYER.split()
}


def write_published(folder, name):
    """Write the directory of one of CONFIGS, with random weights."""
    values, is_qwen = dict(CONFIGS[name]), name.startswith("qwen")
    tokenizer = make_qwen_tokenizer(folder) if is_qwen else save_unigram(folder)
    values["vocab_size"], generation = tokenizer.vocab_size + 5, DERIVED
    if is_qwen:
        text, turn = (tokenizer.backend.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
        is_base = name == "qwen25"
        tokens = dict(bos_token_id=text, pad_token_id=text, eos_token_id=text if is_base else [turn, text])
        generation = (BASE if is_base else CHAT) | tokens
        values |= dict(bos_token_id=text, eos_token_id=text if is_base else turn)
    write_json(folder / "config.json", values)
    torch.manual_seed(1)
    kind = AutoModelForCausalLM if is_qwen else AutoModelForSeq2SeqLM
    kind.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    if not values["tie_word_embeddings"]:  # which transformers 5 does not leave a T5 without
        head = torch.randn(values["vocab_size"], 16, dtype=torch.bfloat16) / 16
        tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": head}
        save_file(tensors, folder / "model.safetensors", dict(format="pt"))
    write_json(folder / "config.json", values)  # in place of transformers' own
    write_json(folder / "generation_config.json", generation | dict(transformers_version="4.37.0"))


def logits_of(directory):
    """The logits that transformers computes for some ids with the model in a directory, in float32."""
    ids = torch.arange(3, 40)[None]
    is_qwen = "is_encoder_decoder" not in (directory / "config.json").read_text()
    model = (
        (AutoModelForCausalLM if is_qwen else AutoModelForSeq2SeqLM)
        .from_pretrained(directory, dtype=torch.float32)
        .eval()
    )
    with torch.no_grad():
        return model(input_ids=ids, **({} if is_qwen else dict(decoder_input_ids=ids))).logits
