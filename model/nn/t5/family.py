"""The family T5."""

from model.nn.base import Family
from model.nn.t5 import footprint, huggingface
from model.nn.t5.batch import collate
from model.nn.t5.network import TextToTextModel, inner_names
from model.nn.t5.sizes import T5ModelConfig
from model.nn.t5.warm_up import kernel_works

T5 = Family(
    name="t5",
    config_class=T5ModelConfig,
    build=TextToTextModel,
    collate=collate,
    first_id=huggingface.first_id,
    step_moments=footprint.step_moments,
    evaluation_moment=footprint.evaluation_moment,
    cache_bytes=footprint.cache_bytes,
    config_of=huggingface.config_of,
    check_config=huggingface.check_config,
    config_with=huggingface.config_with,
    from_hf=huggingface.from_hf,
    aliases=huggingface.ALIASES,
    to_hf=huggingface.to_hf,
    adapter_targets=lambda model_config: ("q", "k", "v", "o", *inner_names(model_config), "wo"),
    task_type="SEQ_2_SEQ_LM",
    kernel_works=kernel_works,
)
