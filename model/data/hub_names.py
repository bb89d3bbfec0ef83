"""Names on Hugging Face and ModelScope: where a download of one lies, and what to type to download it."""

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"\w[\w.-]{,95}(/\w[\w.-]{,95})?")  # ORGANISATION/NAME, or NAME alone for old ones
FOLDERS = dict(model="models", dataset="data")  # kinds of what has a name, and where the guides put them


def modelscope_hub() -> Path:
    """The folder in which ModelScope's programs keep what they download."""
    cache = os.environ.get("MODELSCOPE_CACHE")
    return Path(cache) if cache else Path.home() / ".cache" / "modelscope" / "hub"


def folder_for(name: str, kind: str) -> str:
    """The folder to download a name to, without its organisation."""
    return f"{FOLDERS[kind]}/{name.rsplit('/', 1)[-1]}"


def how_to_download(name: str, kind: str) -> str:
    """What to type to download a `kind` of FOLDERS, on lines of their own."""
    folder, of_kind = folder_for(name, kind), "" if kind == "model" else f" --repo-type {kind}"
    return "\n".join([
        "  download it, then type the same again:",
        f"    hf download {name}{of_kind}    (HF_HOME or HF_HUB_CACHE says where to; older: huggingface-cli download "
        f"{name}{of_kind})",
        f"    HF_ENDPOINT=ADDRESS hf download {name}{of_kind}    (from a mirror)",
        f"    pip install modelscope && modelscope download --{kind} {name} --local_dir {folder}  (then type {folder})",
    ])  # fmt: skip
