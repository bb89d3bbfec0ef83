import json
import os
import pty
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from scripts.chat import answer, find_model, generation_options, load_model, main, parse_arguments
from tests.knowing import PAIRS, write_knowing_model

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chat.py"
ENVIRONMENT = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}  # more threads do not speed up a tiny model
LONG_ANSWERS = ["--max_new_tokens", "100000", "--temperature", "1e9"]
SECONDS = 60


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with model_save/tiny/best, a model overfitted on PAIRS."""
    folder = tmp_path_factory.mktemp("project")
    write_knowing_model(folder / "model_save" / "tiny" / "best")
    (folder / "model_save" / "tiny" / "config.json").write_text("{}")
    return folder


def chat_through_pipe(folder, questions, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, env=ENVIRONMENT, input=questions.encode(),
        capture_output=True, timeout=SECONDS,
    )  # fmt: skip


class Terminal:
    """chat.py in a pseudo terminal."""

    def __init__(self, folder, *arguments):
        self.output = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(sys.executable, [sys.executable, str(SCRIPT), *arguments], ENVIRONMENT)

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, text):
        """The output up to the end of `text`; later output is kept for the next call."""
        deadline = time.monotonic() + SECONDS
        while text.encode() not in self.output:
            assert select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0], self.output.decode()
            self.output += os.read(self.fd, 4096)
        seen, _, self.output = self.output.partition(text.encode())
        return seen.decode() + text

    def exit_code(self, key):
        """Type `key`, read the rest of the output and return the exit code of the process.

        Types it again every second until there is output: readline loses a signal that comes just after its prompt.
        """
        self.type(key)
        for _ in range(SECONDS):
            if select.select([self.fd], [], [], 1)[0]:
                break
            self.type(key)
        try:
            while data := os.read(self.fd, 4096):
                self.output += data
        except OSError:  # Linux reports the end of a pseudo terminal so
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_questions_from_a_pipe_are_answered_one_after_the_other_and_nothing_else_is_printed(project):
    done = chat_through_pipe(project, "\ufeff你好\n\n   \n请说一个字 \r\ncls\nhello\nexit\n你好\n")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "".join(f"{expected}\n" for expected in PAIRS.values())
    assert done.stderr == b""


def test_an_answer_cut_in_the_middle_of_a_character_shows_none_of_it(project, capsys):
    words = ["--temperature", "0.01", "--top_p", "0.5", "--max_new_tokens", "12"]
    model, tokenizer = load_model(find_model(project / "model_save" / "tiny"))
    answer(model, tokenizer, "请说一个字", generation_options(parse_arguments(words)))
    assert capsys.readouterr().out == "龘龘🐱\n"  # 3, 3 and 4 of the 12 bytes; the other 2 begin a character


def test_a_terminal_shows_prompts_and_answers_and_ctrl_d_and_ctrl_c_exit_with_0(project):
    first, second, third = [Terminal(project, *words) for words in ([], ["model_save/tiny"], LONG_ANSWERS)]
    assert "model_save/tiny/best on c" in first.wait_for("> ")
    for question, expected in PAIRS.items():
        first.type(question + "\n")
        first.wait_for(question + "\r\n")
        assert first.wait_for("> ") == expected.replace("\n", "\r\n") + "\r\n> "
    first.type("cls\n")
    first.wait_for("\033[2J")
    first.wait_for("> ")
    second.wait_for("> ")
    third.wait_for("> ")
    third.type("你好\n")
    third.wait_for("你好\r\n")
    time.sleep(0.05)
    for terminal, key in ((third, "\x03"), (first, "\x04"), (second, "\x03")):  # the third is still answering
        assert terminal.exit_code(key) == 0
        assert b"Traceback" not in terminal.output


def test_a_directory_without_a_model_is_refused_with_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"no model in {tmp_path}: name a Hugging Face directory" in printed.err


def test_an_incomplete_or_damaged_model_is_refused(project, tmp_path):
    best = shutil.copytree(project / "model_save" / "tiny" / "best", tmp_path / "model")
    weights = load_file(best / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "wo" not in k}, best / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="does not fit this model: 4 tensors missing.*wo.weight"):
        load_model(best)
    (best / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_model(best)


INVALID = (
    dict(num_layers=2_000_000), dict(d_model=-1), dict(num_heads="4"), dict(d_kv=None), dict(dense_act_fn="none"),
    dict(feed_forward_proj="gated-none"), dict(feed_forward_proj=3), dict(dense_act_fn="gated-gelu"),
    dict(decoder_start_token_id="x"), dict(decoder_start_token_id=10**6), dict(tie_word_embeddings="no"),
    dict(vocab_size=0), dict(num_layers=256), dict(model_type="bert"), dict(vocab_size=100),
)  # fmt: skip


@pytest.mark.parametrize("changes", INVALID, ids=str)
def test_an_invalid_config_is_refused_with_a_reason_within_two_seconds_and_300_mib(project, tmp_path, changes, capsys):
    best = shutil.copytree(project / "model_save" / "tiny" / "best", tmp_path / "model")
    config = json.loads((best / "config.json").read_text())
    (best / "config.json").write_text(json.dumps(config | changes))
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main([str(best)]) == 2
    growth_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert time.monotonic() - began < 2 and growth_bytes < 300 * 2**20
    assert str(best) in capsys.readouterr().err


@pytest.mark.parametrize(
    "how",
    [dict(feed_forward_proj="gelu"), dict(feed_forward_proj="gated-gelu"), dict(tie_word_embeddings=False)],
    ids=str,
)
def test_other_t5_variants_give_the_logits_of_transformers(project, tmp_path, how):
    best = shutil.copytree(project / "model_save" / "tiny" / "best", tmp_path / "model")
    config = T5Config(**T5Config.from_pretrained(best).to_diff_dict() | how)
    T5ForConditionalGeneration(config).save_pretrained(best)
    expected = T5ForConditionalGeneration.from_pretrained(best).eval()
    ours, _ = load_model(best)
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        both = [model(input_ids=ids, decoder_input_ids=ids).logits for model in (ours, expected)]
    assert torch.equal(*both)
    assert ours.generation_config.decoder_start_token_id == expected.generation_config.decoder_start_token_id


@pytest.mark.parametrize("words", (["--temperature", "0"], ["--top_p", "1.5"], ["--max_new_tokens", "0"]))
def test_numbers_out_of_range_are_refused(words):
    with pytest.raises(ValueError, match=f"{words[0]}={words[1]}: must be"):
        generation_options(parse_arguments(words))


def test_a_run_directory_stands_for_its_best_model_else_its_last(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("last", "best"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).touch()
        assert find_model(tmp_path) == tmp_path / name
