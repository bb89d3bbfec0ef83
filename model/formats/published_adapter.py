"""An adapter's files as others read them: its base by its name on a hub, not by a directory of this machine."""

import json

from safetensors.torch import save

from model.formats.adapters import BASE, CONFIG, TENSORS, metadata_of
from model.formats.model_card import CARD_FILE, read_card, with_named_base
from model.formats.tensor_files import read_tensors
from model.runtime.json_stream import read_object


def base_named(directory):
    """Where an adapter's configuration says that its base is, a directory or a name; ValueError if it says nothing."""
    named = read_object(directory / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ValueError(f"{directory / CONFIG} says base_model_name_or_path={named!r:.80}: write the base's name")
    return named


def published_adapter(directory, base):
    """{name of a file: its bytes} of those that name the base's directory, with the name `base` in its place."""
    values = read_object(directory / CONFIG) | dict(base_model_name_or_path=base)
    changed = {CONFIG: (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()}
    if card := read_card(directory):
        named = with_named_base(card, base_named(directory), base)
        changed[CARD_FILE] = named.encode("utf-8", errors="replace")
    file = directory / TENSORS[0]
    if "seen_from_here" in (metadata := metadata_of(file)):
        kept = {name: value for name, value in metadata.items() if name != "seen_from_here"}
        changed[file.name] = save(read_tensors(file), {BASE: json.dumps(kept)})
    return changed
