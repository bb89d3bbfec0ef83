"""The command test prints several models beside each other."""

import json
import re
import shutil

import pytest

from model.data.tokenizer import load_tokenizer
from model.formats.weights import export_model
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from tests.ranks import fork_ranks, wait_for
from tests.tiny import SHORT, command, journal, refused, train
from tests.trials import QWEN_SIZES
from train_low_mem import main

ANSWERED = ["--test_file=valid.jsonl", "--bleu_pairs=4", "--max_new_tokens=6"]
RUNS = dict(one=dict(learn_rate=0.02), other=dict(prompt_prefix="问：", max_new_tokens=99))


@pytest.fixture(scope="module")
def home(home):
    """A folder with two runs, which were validated on `ANSWERED`'s file, and a decoder's directory."""
    for name, options in RUNS.items():
        done = train(home, output_dir=name, **SHORT | options)
        assert done.codes == [0], done.text
    tokenizer = load_tokenizer(home / "model_save" / "tokenizer")
    model = DecoderModel(DecoderModelConfig(**QWEN_SIZES, vocab_size=tokenizer.vocab_size)).initialise(1)
    export_model(model, tokenizer, home / "decoder")
    return home


def table(text, title):
    """{name of a row: its values} of the table whose first line is `title`."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split() == title)
    rows = (re.split("  +", line) for line in lines[start + 1 : start + 12])
    return {name: values for name, *values in rows}


def test_models_of_runs_stand_in_one_table_each_measured_as_its_run_says(home):
    done = command(home, "test", "one", "other/best", "--show", "2", *ANSWERED)
    assert done.codes == [0], done.text
    rows = table(done.text, ["one", "other/best"])
    expected = [f"{journal(home / name, 'eval')[-1]['loss']:.4f}" for name in RUNS]
    assert rows["loss"] == expected, "with its prefix"
    assert all(len(values) == 2 for values in rows.values())
    assert {"loops", "ended", "distinct-2", "exact", "nats a character", "BLEU", "chrF", "ROUGE-L"} <= rows.keys()
    shown = [line.split("  ")[1] for line in done.text.splitlines() if line.startswith("  ")]
    assert [name.strip() for name in shown[-6:]] == ["right answer", "one", "other/best"] * 2
    again = fork_ranks(2, main, ["test", "one", "other", *ANSWERED], folder=home)
    of_two = wait_for(again, home, 90)
    assert of_two.codes == [0, 0] and table(of_two.text, ["one", "other"])["loss"] == expected


def test_a_directory_that_no_run_is_known_of_is_tested_and_a_decoder_beside_a_t5(home):
    done = command(home, "test", "decoder", "one", "--show=1", *ANSWERED)
    assert done.codes == [0], done.text
    assert len(table(done.text, ["decoder", "one"])["chrF"]) == 2 and "1. " in done.text
    drawn = command(home, "test", "one", "--show=1", "--temperature=50", *ANSWERED)
    assert table(drawn.text, ["one"])["chrF"] != table(done.text, ["decoder", "one"])["chrF"][1:]
    alone = command(home, "test", "--output_dir=one", "--show=1", *ANSWERED)
    assert alone.codes == [0] and "test one/best: loss" in alone.text and "  right answer  " in alone.text


def test_models_and_a_directory_alone_are_asked_questions_with_choices(home):
    for name in ("law", "logic"):
        rows = "".join(f'"问{place}, {name}",甲,乙,丙,丁,{"ABCD"[place % 4]}\n' for place in range(5))
        (home / f"{name}_test.csv").write_text(rows, encoding="utf-8")
    alone = command(home, "test", "decoder", "--choices_file=law_test.csv")
    assert alone.codes == [0] and (share := re.search("test law: ([0-9.]+ %) of 5 questions", alone.text)), alone.text
    done = command(home, "test", "decoder", "one", "--choices_file=.")
    assert done.codes == [0], done.text
    rows = [re.split("  +", line) for line in done.text.splitlines() if re.match("law|logic|  +decoder", line)]
    assert [row[0] for row in rows] == ["", "law", "logic"] and rows[0][1:] == ["decoder", "one"]
    assert rows[1][1] == share[1] and all(len(row) == 3 for row in rows)
    assert all(f"test {name}: accuracy " in done.text for name in ("decoder", "one/best"))


def test_a_model_of_preferences_is_asked_pairs_beside_others_whatever_its_best_was_chosen_by(home):
    shutil.copytree(home / "one", home / "preferring")
    path = home / "preferring" / "config.json"
    stored = json.loads(path.read_text())
    stored["given"] |= dict(objective="dpo", best_metric="accuracy", beta=0.3)
    path.write_text(json.dumps(stored))
    done = command(home, "test", "preferring", "one", *ANSWERED)
    assert done.codes == [0], done.text
    one, other = table(done.text, ["preferring", "one"])["loss"]
    assert one == other


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["one", "nothing", *ANSWERED], ["nothing: no model is there to test: name a run directory"]),
        (["one", "other"], ["one other are compared on one file: type --test_file=FILE"]),
        (["one", "--output_dir=other", *ANSWERED], ["to compare its model too, type test one other"]),
        (["one", "other", "--show=some", *ANSWERED], ["--show=some: this option takes a whole number"]),
        (["one", "--choices_file=.", "--show=2"], ["--show=2: of questions with choices", "leave it out"]),
        (["one", "other", "--epoch=3", *ANSWERED], ["unknown option --epoch"]),
    ],
)
def test_what_cannot_be_compared_is_refused(home, words, parts):
    assert refused(command(home, "test", *words), *parts)


def test_a_model_that_was_read_otherwise_is_told_apart(home):
    rows = [
        dict(
            messages=[dict(role=role, content=f"天{turn}{role}") for turn in range(2) for role in ("user", "assistant")]
        )
    ]
    (home / "talk.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 2))
    done = command(home, "test", "decoder", "one", "--test_file=talk.jsonl", "--bleu_pairs=4", "--max_new_tokens=4")
    assert done.codes == [0] and "the models were not asked the same questions" in done.text, done.text
