"""Under CHAT_LANG=zh what the commands print has no English sentence: code, paths, names and options do not count."""

import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.commands.scripts_zh import SCRIPTS_ZH
from model.display.catalogue import CATALOGUE
from model.formats.weights import export_model
from model.run.run_dir import TOKENIZER_DIR
from tests.english import english_of
from tests.tiny import furnish
from train_low_mem import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
LAUNCHERS = "run_train.sh", "train_sft_custom.sh", "quick_start_sft_fast.sh", "recipes/chat_small.sh", "recipes/mini.sh"
TRAINED = dict(step=145, pairs_seen=580, loss=0.5, learn_rate=1e-3, tokens_per_second=5, step_seconds=1.0, epoch=0)


@pytest.fixture(autouse=True)
def in_chinese(monkeypatch):
    monkeypatch.setenv("CHAT_LANG", "zh")


def printed(run, *words):
    """What `run` prints to stdout and stderr with `words` as command line."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(sys, "argv", list(map(str, words)))
            run()
    return out.buffer.getvalue().decode()


def test_an_english_sentence_is_found_and_code_is_not():
    assert english_of("ok     train_file   data/a.jsonl; 3 rows checked\n  no pair is left") == ["  no pair is left"]
    assert not english_of("继续训练请输入 python train_low_mem.py train --output_dir=a\nCPU 0.5 GiB NVIDIA H100")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_help_of_each_script_is_chinese_down_to_each_option(script):
    before = sys.path.copy()
    text = printed(lambda: runpy.run_path(str(script), run_name="__main__"), script, "--help")
    sys.path[:] = before
    assert SCRIPTS_ZH[script.stem][""].splitlines()[0][:20] in text and not english_of(text)
    helps = text.partition("\n选项：\n")[2]
    names = set(re.findall(r"^  (?:-h, )?--(\w+)", helps, re.MULTILINE)) - {"help"}
    missing = names - SCRIPTS_ZH[script.stem].keys()
    assert not missing and (names or script.stem in ("train_lora", "merge_lora", "convert_tokenizer", "lm_eval_model"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_usage_of_each_launcher_is_chinese(launcher):
    done = subprocess.run(["bash", ROOT / "scripts" / launcher, "--help"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("用法") and not english_of(done.stderr)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node: apt-get install nodejs")
def test_the_page_says_figures_and_errors_in_chinese():
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "model" / "serve" / "page").glob("*.js"))
    names = "say|problemOf|saysSomething"
    functions = "".join(re.findall(rf"^function (?:{names})\(.*?^}}\n", page, re.MULTILINE | re.DOTALL))
    words = {key.removeprefix("page."): text for key, text in CATALOGUE["zh"].items() if key.startswith("page.")}
    failed = [dict(state="failed", status=status, reason="top_p=2") for status in (0, 400, 401, 429, 503, 500)]
    others = [dict(state="stopped"), dict(state="open"), dict(state="done"), dict(finish="length", tokens=1200)]
    code = f"""const words = {json.dumps(words)};{functions}
    console.log(JSON.stringify([say(words.figures, {{tokens: 1453, seconds: "2.0", speed: 700}}),
      ...{json.dumps(failed + others)}.map((reply) => problemOf(reply, false))]))"""
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    figures, lost, *errors = json.loads(done.stdout)
    assert figures == "每秒 700 个词元（2.0 秒 1,453 个）" and "恢复后再问一次" in lost
    assert errors[:5] == [
        "请求被拒绝：top_p=2", "API 密钥缺失或不对：请在设置里填写。", "服务器正忙，请稍后再问。",
        "服务器暂时无法回答：top_p=2", "请求被拒绝：top_p=2",
    ]  # fmt: skip
    assert [text[:4] for text in errors[5:]] == ["已停止。", "页面关闭", "模型的回", "回答到最"] and "1,200" in errors[
        -1
    ]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(furnish(tmp_path))
    return tmp_path


def test_doctor_and_plan_say_everything_in_chinese(home):
    words = ["--model=tiny", "--train_file=train.jsonl", "--validation_file=", "--max_seq_len=64"]
    checked = printed(lambda: main(["doctor", *words]), "train_low_mem.py")
    assert "正常   磁盘" in checked and "分词器" in checked and not english_of(checked)
    planned = [
        printed(lambda line=line: main(["plan", *words, *line]), "train_low_mem.py")
        for line in (["--gpu_memory_limit_gb=8"], [], ["--train_file=none.jsonl", "--finetune_from_ckp_file=none"])
    ]
    assert all("一直占用" in text and not english_of(text) for text in planned), planned
    assert "改用梯度检查点" in planned[0] and "没有 GPU" in planned[1]


def test_prepare_data_and_its_report_and_train_tokenizer_are_chinese(home):
    tools = {name: lambda name=name: runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
             for name in ("prepare_data", "train_tokenizer")}  # fmt: skip
    rows = [
        dict(prompt="天 一", response="好", note="x"),
        dict(prompt="", response="好"),
        dict(prompt="天", response="好"),
    ]
    (home / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 70) + "{bad\n")
    (home / "text.txt").write_text((ROOT / "README.zh.md").read_text(encoding="utf-8"), encoding="utf-8")
    line = ["raw.jsonl", "./raw.jsonl", "--output", "a.parquet", "--report", "--tokenizer_dir", TOKENIZER_DIR]
    text = printed(tools["prepare_data"], "prepare_data.py", *line)
    told = [line for line in text.splitlines() if "未使用：" not in line]  # why a row is malformed stays English
    assert "问题为空" in text and "未使用: 列 'note'" in text and "近似重复" in text and not english_of("\n".join(told))
    text = printed(tools["train_tokenizer"], "train_tokenizer.py", "text.txt", "--output_dir=t", "--vocab_size=400")
    assert "每个词元的字符数" in text and not english_of(text)


def test_the_report_of_a_run_is_chinese(home, capsys):
    records = [dict(kind="start", total_steps=1453, total_pairs=5274), dict(kind="train", **TRAINED)]
    records += [dict(kind="eval", step=145, loss=0.1003), dict(kind="oom", step=9, where="evaluate", rank=0)]
    records += [dict(kind="save", step=145, path="run/145"), dict(kind="stop", step=145, reason="asked")]
    (home / "metrics.jsonl").write_text("".join(json.dumps(dict(time=1.0) | record) + "\n" for record in records))
    script = ROOT / "scripts" / "check_training_progress.py"
    text = printed(lambda: runpy.run_path(str(script), run_name="__main__"), script, home)
    assert "按要求停止，第 145 步" in text and "最近一次在第 9 步（评估）" in text and not english_of(text)


def test_what_chat_says_to_its_commands_is_chinese(home, model, tokenizer, monkeypatch, capsys):
    export_model(model, tokenizer, home / "model")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import chat

    loaded = chat.load_chat_model(home / "model")
    talk = chat.Talk(loaded, loaded.sampling, 1)
    chat.greet(loaded)
    for command in ("reset", "undo", "settings", "save saved.jsonl", "nothing"):
        chat.obey(talk, *command.split())
    text = capsys.readouterr().out
    assert "新的对话开始了" in text and "命令：" in text and not english_of(text)
