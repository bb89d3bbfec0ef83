"""Which files of a model directory go to the Hugging Face Hub, and their way there.

Only files that a model is made of are named here: no checkpoint, token store, log or other file of a run is sent.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model.data.hub_names import HUB_NAME
from model.data.tokenizer import TOKENIZER_FILES
from model.formats.adapters import adapter_directory, weights_directory
from model.formats.model_card import CARD_FILE, hub_name, read_card, with_base
from model.formats.published_adapter import base_named, published_adapter
from model.formats.weights import INDEX
from model.runtime.json_stream import read_object

# besides TOKENIZER_FILES, which vocabulary.json and shared_vocabulary.json of CTranslate2 are as well
SENT = re.compile(
    r"README\.md|LICENSE(\.\w+)?|Modelfile|(generation_|adapter_)?config\.json|(adapter_)?model\.safetensors"
    r"|model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json|[\w.-]+\.gguf|model\.bin|(shared_)?vocabulary\.json"
)
# what holds the weights: of Hugging Face's directories, adapters, GGUF, CTranslate2
WEIGHTS = re.compile(r".*\.safetensors|.*\.gguf|model\.bin")

# what holds a JSON object in all of these
OBJECTS = re.compile(r"(generation_|adapter_|tokenizer_)?config\.json|model\.safetensors\.index\.json")
CONFIG = "config.json"


@dataclass(frozen=True)
class Parcel:
    """The files of a directory that are sent, and the names of what stays behind.

    `changed` has what is sent in place of a file, by its name; `base` is the name on the Hub of what was trained
    on, if it is known.
    """

    directory: Path
    files: list[Path]
    left: list[str]
    changed: dict[str, bytes]
    base: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of what is sent, by the names of the files."""
        return {path.name: len(self.changed.get(path.name, b"")) or path.stat().st_size for path in self.files}


def parcel_of(path: str | Path, base: str = "") -> Parcel:
    """What of a model, adapter, export or run directory (its best/, else its last/) is sent.

    `base` is the name on the Hub of what was trained on; an adapter needs it where Hugging Face's cache does not tell
    it. Raises ValueError if there is no model, a damaged one, or an adapter whose base has no name there.
    """
    path = Path(path)
    directory = weights_directory(path) or path
    names = sorted(directory.iterdir()) if directory.is_dir() else []
    files = [one for one in names if _is_sent(one)]
    if not any(WEIGHTS.fullmatch(one.name) for one in files) or (directory / "state.json").exists():
        raise ValueError(
            f"no model in {path}: name a model's directory, an adapter's, what scripts/export.py wrote, or a run "
            "directory with best/ or last/, for example model_save/sft_fast"
        )
    _check_whole(directory, [one.name for one in files])
    left = [one.name for one in names if one not in files]
    if base and not ("/" in base and HUB_NAME.fullmatch(base)):
        raise ValueError(f"--base={base!r}: it must be ORGANISATION/NAME, for example Qwen/Qwen3-0.6B")
    if adapter_directory(directory):
        base = base or _base_on_hub(directory)
        return Parcel(directory, files, left, published_adapter(directory, base), base)
    if not base:
        return Parcel(directory, files, left, {})
    if not (card := read_card(directory)):
        raise ValueError(f"--base={base}: {directory} has no {CARD_FILE} that could name it: write one")
    changed = {CARD_FILE: with_base(card, base).encode("utf-8", errors="replace")}
    return Parcel(directory, files, left, changed, base)


def _base_on_hub(directory):
    """The name of an adapter's base on the Hub, as the adapter or Hugging Face's cache tells. Raises ValueError."""
    named = base_named(directory)
    known = named if not Path(named).is_absolute() and not os.path.exists(named) else hub_name(named)
    if HUB_NAME.fullmatch(known) and "/" in known:
        return known
    raise ValueError(
        f"the adapter in {directory} was trained on {named}, a directory that nobody else has: add "
        f"--base=ORGANISATION/NAME, the base's name on the Hub (where it is not there, send it first), or send a whole "
        f"model: python scripts/merge_lora.py {directory} MERGED, then python scripts/push.py MERGED USER/NAME"
    )


def _check_whole(directory, names):
    """Raise ValueError unless those of these files that others read a model by can be read, and name no other."""
    objects = {name: read_object(directory / name) for name in names if OBJECTS.fullmatch(name)}
    if any(name.startswith("model") and name.endswith(".safetensors") for name in names):
        model_type = objects.get(CONFIG, {}).get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise ValueError(
                f"{directory / CONFIG} says model_type={model_type!r:.80}: it must name the network's kind, as the "
                "config.json that the model was written with does: copy it again, and nothing was sent"
            )
    for name in names:
        if name.endswith(".safetensors"):
            _check_header(directory / name)
    shards = objects.get(INDEX, {}).get("weight_map", {})
    if missing := [name for name in (shards.values() if isinstance(shards, dict) else [shards]) if name not in names]:
        raise ValueError(f"{directory / INDEX} names {missing[0]!r:.80}, and it is not there: copy it too")


def _check_header(path):
    """Raise ValueError for a safetensors file whose header does not say what the file holds; reads no more of it."""
    try:
        with safe_open(path, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}: copy it again, and nothing was sent") from None


def _is_sent(path):
    """Whether this is one of a model's files; a link may lead to what is not to be published."""
    named = path.name in TOKENIZER_FILES or SENT.fullmatch(path.name)
    return bool(named) and path.is_file() and not path.is_symlink()


def check_name(name: str) -> None:
    """Raise ValueError for what is not USER/NAME."""
    if not HUB_NAME.fullmatch(name) or "/" not in name:
        raise ValueError(f"REPO={name!r}: it must be USER/NAME, for example ada/my-chat-model")


def send(parcel: Parcel, name: str, is_public: bool) -> str:
    """Create the repository where there is none, send the files in one commit, and return its address.

    Raises ValueError if it exists and is public though that was not asked for, or nobody is logged in, and RuntimeError
    for what the Hub or the network refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # takes a second
    from huggingface_hub.errors import LocalTokenNotFoundError
    from huggingface_hub.utils import httpx  # the one that this version of it stands on

    api = HfApi(token=True)  # the one of hf auth login, without which it raises
    try:
        address = api.create_repo(name, private=not is_public, exist_ok=True)
        if not is_public and not api.repo_info(name).private:
            raise ValueError(
                f"{address} is public: add --public to send this for everybody, or name another repository"
            )
        files = [CommitOperationAdd(path.name, parcel.changed.get(path.name, str(path))) for path in parcel.files]
        api.create_commit(name, files, commit_message="Model files")
    except LocalTokenNotFoundError:
        raise ValueError("nobody is logged in: hf auth login, with a token that may write") from None
    except (httpx.HTTPError, OSError) as error:
        raise RuntimeError(f"the Hub did not take it: {error}") from None
    return str(address)
