"""Dialogues whose last answer stands in an earlier turn, a model trained on them, and conversations with it.

A dialogue has three turns: a name, a favourite, then a question about one of the two, which the last turn alone does
not answer. Names and favourites of the test dialogues were seen, but not together. Everything runs as people run it:
train_tokenizer.py and train_low_mem.py, then the conversation as chat.py and serve.py hold it, with the model's own
answers as the earlier ones.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

from model.serve.answering import answer_all, prompt_ids

ROOT = Path(__file__).resolve().parents[1]
NAMES = "小明 小红 阿强 丽丽 王芳 张伟 刘洋 陈静 赵磊 孙悦 周杰 吴敏 老郑 小冯 阿珍 大鹏".split()
LIKED = "苹果 足球 音乐 下雨 猫 狗 面条 读书 爬山 电影 咖啡 雪 跑步 画画 茶 游泳".split()
SHAPE = dict(d_model=64, d_ff=128, num_heads=4, d_kv=16, num_layers=2, num_decoder_layers=2)
MIN_SHARE, NUM_TESTED = 0.95, 200
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 128, 16


def dialogue(name, liked, asks_name):
    """The six texts of three turns: the questions at even places."""
    question, answer = ("我叫什么名字？", f"你叫{name}。") if asks_name else ("我喜欢什么？", f"你喜欢{liked}。")
    return [f"你好，我叫{name}。", f"你好，{name}！", f"我很喜欢{liked}。", "我记住了。", question, answer]


def made_up(count, seed, is_tested):
    """Dialogues about pairs of a name and a favourite, a fifth of which are only in the test."""
    draw = random.Random(seed)
    pairs = [(n, x) for i, n in enumerate(NAMES) for j, x in enumerate(LIKED) if ((i + j) % 5 == 0) == is_tested]
    return [dialogue(*draw.choice(pairs), draw.random() < 0.5) for _ in range(count)]


def write_messages(path, dialogues):
    """Write dialogues as OpenAI's messages."""
    roles = ("user", "assistant") * 3
    rows = [[dict(role=role, content=text) for role, text in zip(roles, texts, strict=True)] for texts in dialogues]
    path.write_text("\n".join(json.dumps(dict(messages=row), ensure_ascii=False) for row in rows), encoding="utf-8")


def train(folder, num_dialogues, epochs):
    """Train a model in `folder` on made-up dialogues; returns its directory."""
    write_messages(folder / "train.jsonl", made_up(num_dialogues, 0, False))
    write_messages(folder / "valid.jsonl", made_up(100, 1, False))
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    run = [f"--{name}={value}" for name, value in dict(
        model="shape.json", train_file="train.jsonl", validation_file="valid.jsonl", tokenizer_dir="tokenizer",
        max_seq_len=MAX_PROMPT_TOKENS, epochs=epochs, global_batch_size=64, bleu_pairs=0, output_dir="run",
        screen="off",
    ).items()]  # fmt: skip
    for line in (
        [ROOT / "scripts" / "train_tokenizer.py", "train.jsonl", "--output_dir", "tokenizer", "--vocab_size", "600"],
        [ROOT / "train_low_mem.py", "train", *run],
    ):
        subprocess.run([sys.executable, *map(str, line)], cwd=folder, check=True)
    return folder / "run"


def talk(chat, dialogues):
    """The conversations that the questions of these dialogues give, each a list of (role, text)."""
    talks = [[] for _ in dialogues]
    for place in (0, 2, 4):
        for turns, texts in zip(talks, dialogues, strict=True):
            turns.append(("user", texts[place]))
        inputs = [prompt_ids(chat, turns, MAX_PROMPT_TOKENS) for turns in talks]
        for turns, answer in zip(talks, answer_all(chat, inputs, chat.sampling, MAX_NEW_TOKENS), strict=True):
            turns.append(("assistant", answer.strip()))
    return talks


def talk_alone(chat, dialogues):
    """The answers to the last questions by themselves."""
    inputs = [prompt_ids(chat, [("user", texts[4])], MAX_PROMPT_TOKENS) for texts in dialogues]
    return [text.strip() for text in answer_all(chat, inputs, chat.sampling, MAX_NEW_TOKENS)]


def shares_right(chat, dialogues, talks):
    """(share of right last answers in `talks`, the share if the last question is asked by itself)."""
    kinds = [turns[-1][1] for turns in talks], talk_alone(chat, dialogues)
    counts = [sum(answer == texts[-1] for answer, texts in zip(kind, dialogues, strict=True)) for kind in kinds]
    return counts[0] / len(dialogues), counts[1] / len(dialogues)
