"""A model is found by its name in the caches of real download programs, and nothing is downloaded."""

import os
import subprocess
import sys

import pytest

FIND = "import sys; from model.commands.model_cache import find_model; print(find_model(sys.argv[1]))"
NAME, COMMIT = "Qwen/Qwen1.5-7B-Chat", "5f4f5e69ac7f1d508f8369e977de208b4803444b"


def find(name, folder):
    """What find_model prints in a process whose caches are in `folder`."""
    caches = dict(HF_HOME=folder / "hf", MODELSCOPE_CACHE=folder / "ms")
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_CACHE"} | {
        k: str(v) for k, v in caches.items()
    }
    return subprocess.run([sys.executable, "-c", FIND, name], env=env, capture_output=True, text=True, timeout=60)


def fill(directory, *names):
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_text("{}")


def test_a_snapshot_of_hugging_face_is_found_and_one_without_weights_is_refused(tmp_path):
    cached = tmp_path / "hf" / "hub" / "models--Qwen--Qwen1.5-7B-Chat"
    fill(cached / "refs")
    (cached / "refs" / "main").write_text(COMMIT)
    fill(cached / "snapshots" / COMMIT, "config.json")
    done = find(NAME, tmp_path)
    assert done.returncode and "has no weights: finish it" in done.stderr
    (cached / "snapshots" / COMMIT / "model.safetensors").write_text("")
    assert find(NAME, tmp_path).stdout.strip() == str(cached / "snapshots" / COMMIT)


@pytest.mark.parametrize("place", ["models/Qwen/Qwen1___5-7B-Chat", "Qwen/Qwen1___5-7B-Chat"])
def test_a_download_of_modelscope_is_found(tmp_path, place):
    fill(tmp_path / "ms" / place, "config.json", "model-00001-of-00002.safetensors")
    assert find(NAME, tmp_path).stdout.strip() == str(tmp_path / "ms" / place)


def test_a_model_that_is_nowhere_is_refused_with_the_places_and_the_commands(tmp_path):
    error = find(NAME, tmp_path).stderr
    for part in (
        f"{tmp_path}/hf/hub/models--Qwen--Qwen1.5-7B-Chat", f"{tmp_path}/ms/models/Qwen/Qwen1___5-7B-Chat",
        f"hf download {NAME}", f"HF_ENDPOINT=ADDRESS hf download {NAME}", f"modelscope download --model {NAME}",
    ):  # fmt: skip
        assert part in error
    assert "no such file or directory" in find("./nowhere", tmp_path).stderr
