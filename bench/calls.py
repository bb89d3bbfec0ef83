"""Does a small model learn to call tools, and to think only when asked to? Trains one, and asks it through the server.

    python -m bench.calls [--conversations 2000] [--epochs 4] [--folder DIR]

2,000 made-up conversations: half call one of three tools with one of 50 cities as their question names it, half answer
a question about a sum, every other one with a thought. The 200 calls asked for are of a tool with a city that training
never had together; the sums asked for were not in it either. Everything runs as people run it: train_tokenizer.py,
train_low_mem.py on the CPU, serve.py and OpenAI's client. Exit code 1 below 95 % of the calls, or if one thought comes
unasked or stays away.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai

from model.data.answer_parts import CALL, THOUGHT
from model.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
CITIES = (
    "北京 上海 天津 重庆 广州 深圳 成都 杭州 武汉 西安 南京 苏州 长沙 "
    "郑州 青岛 沈阳 大连 厦门 福州 济南 昆明 南宁 贵阳 太原 合肥 南昌 "
    "兰州 银川 西宁 拉萨 海口 三亚 桂林 洛阳 开封 扬州 无锡 常州 宁波 "
    "温州 绍兴 珠海 佛山 东莞 中山 汕头 烟台 威海 哈尔滨 乌鲁木齐"
).split()
QUESTIONS = {
    "weather": ("{}今天天气怎么样？", "查一下{}的天气。", "我要去{}，会下雨吗？"),
    "clock": ("{}现在几点？", "请告诉我{}的时间。", "在{}的朋友起床了吗？看看那里几点。"),
    "people": ("{}有多少人？", "查查{}的人口。", "住在{}的人多不多？"),
}
PARAMETERS = dict(type="object", properties=dict(city=dict(type="string")))
TOOLS = [dict(type="function", function=dict(name=name, parameters=PARAMETERS)) for name in QUESTIONS]
SHAPE = dict(family="qwen3", hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
NUM_TESTED, MIN_SHARE = 200, 0.95
TEMPLATE = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- elif message.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--folder", type=Path, help="keep what is written here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        train(folder, options.conversations, options.epochs)
        seconds = time.monotonic() - started
        calls, on, off = asked_through_the_server(folder / "run", options.port)
    print(f"trained in {seconds:.0f} s on the CPU, with its tokenizer")
    print(f"right calls: {calls:.1%} of {NUM_TESTED}")
    for name, (right, thinks) in (("on", on), ("off", off)):
        print(f"thinking {name}: {right:.1%} of {NUM_TESTED // 2} right, {thinks:.1%} with a thought")
    return 0 if calls >= MIN_SHARE and on[1] == 1 and off[1] == 0 else 1


def calls_made_up(count, seed, is_tested):
    """(question, name of the tool, city): a fifth of the pairs of tool and city are only in the test."""
    draw = random.Random(seed)
    pairs = [(name, city) for i, name in enumerate(QUESTIONS) for j, city in enumerate(CITIES)
             if ((i + j) % 5 == 0) == is_tested]  # fmt: skip
    chosen = [draw.choice(pairs) for _ in range(count)]
    return [(draw.choice(QUESTIONS[name]).format(city), name, city) for name, city in chosen]


def sums_made_up(count, seed, is_tested):
    """(question, thought, answer)."""
    draw = random.Random(seed)
    pairs = [(a, b) for a, b in itertools.product(range(1, 20), repeat=2) if ((a + b) % 5 == 0) == is_tested]
    chosen = [draw.choice(pairs) for _ in range(count)]
    return [(f"{a}加{b}是不是大于{b}？", f"{a}大于零，所以大于{b}。", "是的。") for a, b in chosen]


def rows_made_up(count, seed):
    """Rows of training data."""
    user, assistant = (lambda text: dict(role="user", content=text)), (lambda **said: dict(role="assistant", **said))
    rows = [
        dict(tools=TOOLS, messages=[user(question), assistant(content=None, tool_calls=[dict(
            type="function", function=dict(name=name, arguments=json.dumps(dict(city=city), ensure_ascii=False)))])])
        for question, name, city in calls_made_up(count // 2, seed, False)
    ]  # fmt: skip
    for number, (question, thought, answer) in enumerate(sums_made_up(count // 2, seed, False)):
        more = dict(reasoning_content=thought) if number % 2 else {}
        rows.append(dict(messages=[user(question), assistant(content=answer, **more)]))
    random.Random(seed).shuffle(rows)
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def train(folder, conversations, epochs):
    """Train a tokenizer with TEMPLATE and a model on made-up conversations in `folder`, as people do."""
    write_rows(folder / "train.jsonl", rows_made_up(conversations, 0))
    write_rows(folder / "valid.jsonl", rows_made_up(100, 1))
    write_rows(
        folder / "texts.jsonl", [dict(text=json.dumps(row, ensure_ascii=False)) for row in rows_made_up(2000, 0)]
    )
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    words = dict(
        model="shape.json", train_file="train.jsonl", validation_file="valid.jsonl", tokenizer_dir="tokenizer",
        max_seq_len=512, epochs=epochs, global_batch_size=16, bleu_pairs=0, output_dir="run", screen="off",
        mixed_precision="no", learn_rate=0.01,
    )  # fmt: skip
    called(folder, "scripts/train_tokenizer.py", "texts.jsonl", "--output_dir", "tokenizer", "--vocab_size", "800")
    with_marks(folder / "tokenizer")
    called(folder, "train_low_mem.py", "train", *(f"--{name}={value}" for name, value in words.items()))


def with_marks(directory):
    """Give the tokenizer ChatML's tokens, the marks of thoughts and calls, and TEMPLATE."""
    backend = load_tokenizer(directory).backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([*THOUGHT, *CALL])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def called(folder, script, *words):
    subprocess.run([sys.executable, ROOT / script, *words], cwd=folder, check=True)


def asked_through_the_server(run_dir, port):
    """(share of right calls, (share right, share with a thought) with thinking on, the same with it off)."""
    server = subprocess.Popen([sys.executable, ROOT / "scripts" / "serve.py", run_dir, "--port", str(port)])
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20)
    try:
        with ThreadPoolExecutor(16) as pool:
            calls = list(pool.map(lambda made: is_right_call(client, *made), calls_made_up(NUM_TESTED, 2, True)))
            sums = sums_made_up(NUM_TESTED // 2, 2, True)
            on, off = (list(pool.map(partial(answered, client, thinking), sums)) for thinking in (True, False))
    finally:
        server.terminate()
        server.wait(30)
    return sum(calls) / len(calls), shares(on), shares(off)


def shares(answers):
    return tuple(sum(column) / len(answers) for column in zip(*answers, strict=True))


def ask(client, question, **more):
    messages = [dict(role="user", content=question)]
    return client.chat.completions.create(model="run", messages=messages, max_tokens=128, **more).choices[0]


def is_right_call(client, question, name, city):
    choice = ask(client, question, tools=TOOLS)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    return calls == [(name, dict(city=city))] and choice.finish_reason == "tool_calls"


def answered(client, thinking, made):
    """(whether answer and thought are right, whether there is a thought)."""
    question, thought, answer = made
    message = ask(client, question, extra_body=dict(chat_template_kwargs=dict(enable_thinking=thinking))).message
    given = getattr(message, "reasoning_content", None) or ""
    return (message.content.strip(), given) == (answer, thought if thinking else ""), bool(given)


if __name__ == "__main__":
    sys.exit(main())
