"""Finds a model by its name on Hugging Face or ModelScope among what was downloaded before. Connects to nothing."""

import os
from pathlib import Path

from model.data.hub_names import HUB_NAME, folder_for, how_to_download, modelscope_hub
from model.runtime.paths import check_path

MARKERS = ("config.json", "adapter_config.json")  # a model's directory has one of them
WEIGHTS = ("*.safetensors", "*.bin")


def find_model(name: str) -> str:
    """`name` if it exists, else the directory in which a download of this name lies.

    Raises ValueError, with the places searched and the commands to download, if there is none or it has no weights.
    """
    check_path(name)
    if os.path.exists(name):
        return name
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"{name}: no such file or directory; a downloaded model is named as ORGANISATION/MODEL")
    places = [_hugging_face_place(name), *_modelscope_places(name)]
    found = next((place for place in places if any((place / marker).is_file() for marker in MARKERS)), None)
    if found is None:
        where = f"here; no download of it in {', '.join(map(str, places))}"
        raise ValueError(f"{name}: no such directory {where}\n{how_to_download(name, 'model')}")
    if not any(path for pattern in WEIGHTS for path in found.glob(pattern)):
        raise ValueError(f"{name}: its download in {found} has no weights: finish it\n{how_to_download(name, 'model')}")
    return str(found)


def how_to_get(name: str) -> str:
    """What to type for an option that takes a directory, given a hub's name ORGANISATION/MODEL; "" for other texts."""
    if "/" not in name or not HUB_NAME.fullmatch(name) or os.path.exists(name.split("/")[0]):
        return ""
    try:
        return f"its download is in {find_model(name)}: type that directory"
    except ValueError:
        folder = folder_for(name, "model")
        return "\n".join([
            f"if it is a model's name on Hugging Face, download it, then type {folder}:",
            f"    hf download {name} --local-dir {folder}    (older: huggingface-cli download)",
            f"    HF_ENDPOINT=ADDRESS hf download {name} --local-dir {folder}    (from a mirror)",
            f"    pip install modelscope && modelscope download --model {name} --local_dir {folder}",
        ])  # fmt: skip


def _hugging_face_place(name):
    """The newest snapshot of a model in the cache of huggingface_hub; without one, where it would be."""
    from huggingface_hub import try_to_load_from_cache  # takes a quarter of a second
    from huggingface_hub.constants import HF_HUB_CACHE  # as HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME set it

    for marker in MARKERS:
        try:
            file = try_to_load_from_cache(name, marker)
        except ValueError:  # no name that the hub accepts
            break
        if isinstance(file, str):
            return Path(file).parent
    return Path(HF_HUB_CACHE, "models--" + name.replace("/", "--"))


def _modelscope_places(name):
    """The directories in which ModelScope's versions keep a model, which has ___ for a dot there."""
    hub = modelscope_hub()
    return [hub / "models" / name.replace(".", "___"), hub / name.replace(".", "___")]
