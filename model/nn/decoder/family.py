"""The decoder-only family: Qwen and Llama."""

from model.nn.base import Family
from model.nn.decoder import footprint, huggingface
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig

LAYERS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
DECODER = Family(
    name="qwen2",
    config_class=DecoderModelConfig,
    build=DecoderModel,
    collate=collate,
    first_id=lambda model_config, tokenizer: tokenizer.pad_id,  # not used: an answer follows the last token read
    step_moments=footprint.step_moments,
    evaluation_moment=footprint.evaluation_moment,
    cache_bytes=footprint.cache_bytes,
    config_of=huggingface.config_of,
    check_config=huggingface.check_config,
    config_with=huggingface.config_with,
    from_hf=huggingface.from_hf,
    aliases=(huggingface.HEAD,),
    to_hf=huggingface.to_hf,
    adapter_targets=lambda model_config: LAYERS,
    reads_dialogues=True,
    reads_one_stream=True,
)
