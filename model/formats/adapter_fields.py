"""The fields of PEFT's adapter_config.json: what is computed here, what says nothing of that, and what is refused."""

# what PEFT's adapters may also be, and what is computed here
PLAIN = dict(
    peft_type="LORA", use_dora=False, bias="none", modules_to_save=None, fan_in_fan_out=False, rank_pattern={},
    alpha_pattern={}, lora_bias=False, layer_replication=None, use_qalora=False, trainable_token_indices=None,
    target_parameters=None, alora_invocation_tokens=None, arrow_config=None,
)  # fmt: skip
READ = "r", "lora_alpha", "lora_dropout", "use_rslora", "base_model_name_or_path"
# Fields that say nothing of what is computed: whose adapter it is, which layers it names (the tensors tell), how its
# first values were drawn, sizes of what PLAIN refuses
UNREAD = (
    "auto_mapping", "peft_version", "revision", "task_type", "inference_mode", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
)  # fmt: skip
INITIALISERS = True, False, "gaussian", "eva", "orthogonal", "mica"  # those of PEFT that leave the base's weights alone


def check_known(values, path):
    """Raise ValueError if a field of an adapter's configuration asks for what is not computed here, or is not known."""
    for name, plain in PLAIN.items():
        if values.get(name, plain) != plain and (values[name] or plain):
            raise ValueError(f"{path} says {name}={values[name]!r:.80}: only {plain!r} can be used here")
    initialiser = values.get("init_lora_weights")
    if initialiser and initialiser not in INITIALISERS:
        raise ValueError(
            f"{path} says init_lora_weights={initialiser!r:.80}, which changes the base's weights; {INITIALISERS} "
            "leave them alone: convert it with PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    for name in values.keys() - {*PLAIN, *READ, *UNREAD, "init_lora_weights"}:
        if values[name]:
            raise ValueError(
                f"{path} says {name}={values[name]!r:.80}: this field is not known here, only null or false"
            )
