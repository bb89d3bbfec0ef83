"""What an export keeps of the model that its weights began as, so that other software reads the same model.

config.json and generation_config.json are the base's but for what training changed. Fields that older readers know by
another name than newer ones stand under both.
"""

import json
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

from model.nn.registry import family_of
from model.runtime.json_stream import read_object

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
RECORD = "chat_trainer"  # field of both files: what this trainer knows of the weights
OF_TRAINING = RECORD, "prefix"  # fields of GENERATION_FILE that say how the newest training was
# settings of GENERATION_FILE that greedy decoding has no use for
ONLY_DRAWN = "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"
GUARDS = "repetition_penalty", "no_repeat_ngram_size"  # those against repetition
CHOSEN = "chosen_decoding"  # in RECORD of GENERATION_FILE: its settings were chosen on the run's validation questions
ROTARY = "rope_parameters", "rope_theta", "rope_scaling"  # transformers 5 reads the first, 4 the others
EOS, TIED = "eos_token_id", "tie_word_embeddings"


def write_carried(config_dir, generation_dir, target):
    """Write to `target` the CONFIG_FILE of one directory and the GENERATION_FILE of another, else of the first."""
    for name, folders in ((CONFIG_FILE, [config_dir]), (GENERATION_FILE, [generation_dir, config_dir])):
        if path := next((path for folder in folders if (path := Path(folder, name)).is_file()), None):
            write_json(Path(target, name), read_object(path))


def carried_values(directory, name):
    """The dict in a file of a base's directory; None if there is no directory (None) or no such file."""
    path = directory and Path(directory, name)
    return read_object(path) if path and path.is_file() else None


def config_values(model, tokenizer, dtype, base=None):
    """What config.json says of a network whose weights have this dtype; `base` is the directory of its base's file."""
    family = family_of(model.config)
    own, _ = family.to_hf(model, tokenizer)
    kept = carried_values(base, CONFIG_FILE)
    if kept is None:
        values = dict(sorted((own | dict(transformers_version=version("transformers"))).items()))
    else:
        kept.pop("auto_map", None)  # names code beside the base, which is not copied
        kept = with_both_names(kept | _eos_of(kept, own), own)
        values = kept if _says(kept, family, model.config) else kept | own
    return values | dict(dtype=dtype, torch_dtype=dtype)


def with_both_names(values, own):
    """`values` of a config.json with those rotary fields that they lack and `own` has."""
    return values | {name: own[name] for name in ROTARY if name in own and not values.get(name)}


def generation_values(model, tokenizer, generation, base=None):
    """What generation_config.json says: the base's file in the directory `base`, and `generation` in place of it."""
    _, ids = family_of(model.config).to_hf(model, tokenizer)
    kept = carried_values(base, GENERATION_FILE)
    if kept is None:
        return dict(sorted((ids | generation | dict(transformers_version=version("transformers"))).items()))
    kept = {name: value for name, value in kept.items() if name not in OF_TRAINING}
    values = with_settings(kept, generation) | {EOS: kept.get(EOS, generation.get(EOS))}
    return values | _eos_of(values, generation) | _eos_of(values, ids)


def with_settings(values, settings):
    """`values` of a generation_config.json with `settings`; if these say how to decode, with nothing else that does."""
    if "do_sample" not in settings:
        return values | settings
    kept = {name: value for name, value in record_of(values).items() if name not in (*GUARDS, CHOSEN)}
    record = kept | record_of(settings)
    values = {name: value for name, value in values.items() if name not in (RECORD, *ONLY_DRAWN, *GUARDS)}
    return values | settings | ({RECORD: record} if record else {})


def record_of(values):
    """What this trainer alone reads of the dict in a CONFIG_FILE or GENERATION_FILE; {} without it."""
    record = values.get(RECORD)
    return record if isinstance(record, dict) else {}


def _eos_of(values, own):
    """What makes the ids that end an answer in `values` hold that of `own` too; {} if they do."""
    known = values.get(EOS)
    listed = known if isinstance(known, list) else [] if known is None else [known]
    more = own.get(EOS, listed)
    new = [number for number in (more if isinstance(more, list) else [more]) if number not in listed]
    return {EOS: [*listed, *new] if listed else new[0]} if new else {}


def _says(values, family, model_config):
    """Whether a config.json with these values is read as `model_config`, also as to whether the output is tied."""
    try:
        read = asdict(family.config_of(dict(values), CONFIG_FILE))
    except (KeyError, ValueError):
        return False
    default = {field.name: field.default for field in fields(model_config)}.get(TIED)
    return read | {TIED: values.get(TIED, default)} == {TIED: default} | asdict(model_config)


def write_json(path, values):
    """Write a dict as other software's configurations are written."""
    Path(path).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
