"""The family Qwen."""

from model.nn.base import Family
from model.nn.qwen import footprint, huggingface
from model.nn.qwen.batch import collate
from model.nn.qwen.network import QwenModel
from model.nn.qwen.sizes import QwenModelConfig

LAYERS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
QWEN = Family(
    name="qwen2",
    config_class=QwenModelConfig,
    build=QwenModel,
    collate=collate,
    first_id=lambda model_config, tokenizer: tokenizer.pad_id,  # not used: an answer follows the last token read
    step_moments=footprint.step_moments,
    evaluation_moment=footprint.evaluation_moment,
    cache_bytes=footprint.cache_bytes,
    config_of=huggingface.config_of,
    check_config=huggingface.check_config,
    config_with=huggingface.config_with,
    own_tensors=huggingface.own_tensors,
    aliases=(huggingface.HEAD,),
    file_values=huggingface.file_values,
    adapter_targets=lambda model_config: LAYERS,
    reads_dialogues=True,
    reads_one_stream=True,
)
