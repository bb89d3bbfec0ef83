"""scripts/push.py: what it lists, what it never sends, and a whole way to a hub on this machine."""

import base64
import importlib.util
import io
import json
import os
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors import safe_open

from model.commands.publishing import parcel_of
from model.formats.adapters import export_adapter, read_adapter
from model.formats.weights import export_model
from model.nn.lora import LoraConfig, attach, draw

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "push.py"
SPEC = importlib.util.spec_from_file_location("push_script", SCRIPT)
SPEC.loader.exec_module(script := importlib.util.module_from_spec(SPEC))
SENT = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def run_dir(tmp_path, model, tokenizer):
    """A run directory with best/ and what a run leaves, in best/ too."""
    run = tmp_path / "run"
    export_model(model, tokenizer, run / "best")
    for name in ("metrics.jsonl", "terminal.log", "checkpoints/step_00000001/optimizer.safetensors", "config.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    checkpoint = run / "checkpoints" / "step_00000001"
    os.link(run / "best" / "model.safetensors", checkpoint / "model.safetensors")
    (checkpoint / "state.json").write_text("{}")
    for name in ("optimizer.safetensors", "train.log", "ids.bin", "notes.txt", ".env", "pytorch_model.bin"):
        (run / "best" / name).write_text("private")
    (run / "best" / "LICENSE").symlink_to("/etc/hostname")
    return run


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for on the way of a commit; `server.said` has calls, `server.files` contents."""

    def do_GET(self):
        self.answer(dict(id="ada/chat", private=self.server.private))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        call = self.path.split("?")[0].split("/")[-2 if "main" in self.path else -1]
        lines = [json.loads(line) for line in body.splitlines()]
        self.server.said[call] = lines[0]
        if call == "preupload":
            files = [dict(path=one["path"], uploadMode="regular", shouldIgnore=False) for one in lines[0]["files"]]
            return self.answer(dict(files=files))
        files = [line["value"] for line in lines if line.get("key") == "file"]
        self.server.files |= {one["path"]: base64.b64decode(one["content"]) for one in files}
        address = f"http://{self.headers['Host']}/ada/chat"
        self.answer(dict(url=address, commitUrl=f"{address}/commit/1", commitOid="1" * 40, hookOutput=""))

    def answer(self, values):
        body = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def hub(private=True):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.private, server.said, server.files = private, {}, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def push(monkeypatch, capsys, tmp_path):
    """A function that runs the script and gives its exit code, stdout and stderr; nobody can be asked there."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setenv("CHAT_LANG", "en")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))

    def run(*words, server=None, token="hf_x"):
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port if server else 1}")
        monkeypatch.setenv("HF_TOKEN", token)
        return script.main(list(map(str, words))), *capsys.readouterr()

    return run


def test_a_parcel_has_a_model_s_files_and_nothing_of_a_run(run_dir, tmp_path):
    parcel = parcel_of(run_dir)
    names = [path.name for path in parcel.files]
    assert set(SENT) <= set(names) and parcel.directory == run_dir / "best"
    assert not {"optimizer.safetensors", "train.log", "ids.bin", ".env", "pytorch_model.bin", "LICENSE"} & set(names)
    assert set(parcel.left) == {path.name for path in (run_dir / "best").iterdir()} - set(names)
    (tmp_path / "file").mkdir()
    for name in ("x-f16.gguf", "Modelfile", "README.md", "x.gguf.part"):
        (tmp_path / "file" / name).write_text("x")
    assert [path.name for path in parcel_of(tmp_path / "file").files] == ["Modelfile", "README.md", "x-f16.gguf"]
    for without in (run_dir / "checkpoints" / "step_00000001", run_dir / "checkpoints", tmp_path / "absent"):
        with pytest.raises(ValueError, match="no model in"):
            parcel_of(without)


def test_damaged_weights_are_not_sent(run_dir, push, tmp_path):
    shutil.copytree(run_dir / "best", tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "model.safetensors", 1000)
    code, _, error = push(tmp_path / "damaged", "me/x", "--dry_run")
    assert code == 2 and "model.safetensors cannot be read as weights" in error and "copy it again" in error


@pytest.mark.parametrize(
    "name, text, words",
    [("config.json", "{", "is not JSON"), ("config.json", '{"d_model": 8}', "says model_type=None: it must name")]
    + [("config.json", None, "says model_type=None"), ("generation_config.json", "[1]", "holds a JSON list")]
    + [
        ("model.safetensors.index.json", '{"weight_map": {"x": "model-1-of-2.safetensors"}}', "-2.safetensors', and it")
    ],
)
def test_a_model_that_nobody_could_read_is_not_sent(run_dir, push, name, text, words):
    (run_dir / "best" / name).unlink(missing_ok=True)
    if text is not None:
        (run_dir / "best" / name).write_text(text)
    code, _, error = push(run_dir / "best", "me/x", "--dry_run")
    assert code == 2 and f"best/{name}" in error and words in error


def test_a_dry_run_lists_what_would_be_sent_and_needs_no_network(run_dir, push):
    (run_dir / "best" / "a\x1b[2J\udcff").write_text("a name that clears the screen, and is no text")
    code, out, _ = push(run_dir, "ada/chat", "--dry_run")
    assert "a\\x1b[2J\\udcff" in out
    assert code == 0 and all(f" MiB  {name}\n" in out for name in SENT) and "ada/chat, private:" in out
    assert "not sent: " in out and "train.log" in out and out.endswith("nothing was sent\n")
    code, out, error = push(run_dir, "ada/chat")
    assert code == 2 and "add --yes" in error and " MiB  model.safetensors" in out
    assert "must be USER/NAME" in push(run_dir, "chat", "--dry_run")[2]


def test_the_files_arrive_in_a_private_repository(run_dir, push):
    with hub() as server:
        code, out, error = push(run_dir, "ada/chat", "--yes", server=server)
        assert code == 0, error
        created = server.said["create"]  # huggingface_hub 2 says visibility, 1 private
        assert created["name"] == "chat" and (created.get("private") or created.get("visibility") == "private")
        assert set(SENT) <= set(server.files) and "train.log" not in server.files
        card = server.files["README.md"]
        assert card == (run_dir / "best" / "README.md").read_bytes() and b"base_model" not in card
        assert push(run_dir, "ada/chat", "--yes", "--base=ada/base", server=server)[0] == 0
        assert b'\nbase_model: "ada/base"\n---\n' in server.files["README.md"]
        assert server.files["model.safetensors"] == (run_dir / "best" / "model.safetensors").read_bytes()
    assert "/ada/chat" in out.splitlines()[-1]
    (run_dir / "best" / "README.md").unlink()
    assert "has no README.md" in push(run_dir, "ada/chat", "--yes", "--base=ada/base")[2]


def test_a_public_repository_is_refused_unless_it_is_asked_for_and_a_dead_hub_is_said(run_dir, push):
    with hub(private=False) as server:
        code, _, error = push(run_dir, "ada/chat", "--yes", server=server)
        assert code == 2 and "is public: add --public" in error and not server.files
        assert push(run_dir, "ada/chat", "--yes", "--public", server=server)[0] == 0 and server.files
    code, _, error = push(run_dir, "ada/chat", "--yes")
    assert code == 1 and "the Hub did not take it" in error
    code, _, error = push(run_dir, "ada/chat", "--yes", token="")
    assert code == 2 and "hf auth login" in error


def test_an_adapter_is_sent_with_its_base_s_name_on_the_hub_and_no_directory(tmp_path, model, tokenizer, push):
    cached, plain = tmp_path / "models--ada--base" / "snapshots" / "1", tmp_path / "base"
    for base in (cached, plain):
        export_model(model, tokenizer, base)
    draw(attach(model, LoraConfig(rank=2, alpha=4, targets=("q",), base=str(plain))), 1)
    export_adapter(model, tokenizer, tmp_path / "run" / "best")
    code, _, error = push(tmp_path / "run", "ada/chat", "--dry_run")
    assert code == 2 and f"was trained on {plain}" in error and "--base=ORGANISATION/NAME" in error
    assert "must be ORGANISATION/NAME" in push(tmp_path / "run", "ada/chat", "--base=base", "--dry_run")[2]
    with hub() as server:
        code, out, error = push(tmp_path / "run", "ada/chat", "--base=ada/base", "--yes", server=server)
    assert code == 0 and "trained on top of ada/base" in out, error
    assert not [name for name, content in server.files.items() if str(tmp_path).encode() in content]
    assert b'base = "ada/base"' in server.files["README.md"] and b'base_model: "ada/base"' in server.files["README.md"]

    sent = tmp_path / "sent"
    sent.mkdir()
    for name, content in server.files.items():
        (sent / name).write_bytes(content)
    with safe_open(sent / "adapter_model.safetensors", "pt") as file:
        assert "seen_from_here" not in file.metadata()["base"]
    config = json.loads((sent / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "ada/base"
    (sent / "adapter_config.json").write_text(json.dumps(config | dict(base_model_name_or_path=str(plain))))
    ours, theirs = read_adapter(tmp_path / "run" / "best"), read_adapter(sent)
    assert theirs.lora == ours.lora and all(theirs.tensors[name].equal(ours.tensors[name]) for name in ours.tensors)

    (sent / "adapter_config.json").write_text(json.dumps(config | dict(base_model_name_or_path="a" * 5000)))
    with pytest.raises(ValueError, match="says base_model_name_or_path='a{50,80}: write the base's directory"):
        read_adapter(sent)

    model.lora = LoraConfig(rank=2, alpha=4, targets=("q",), base=str(cached))
    export_adapter(model, tokenizer, tmp_path / "of_cached")
    assert parcel_of(tmp_path / "of_cached").base == "ada/base"
