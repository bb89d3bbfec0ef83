"""lm-evaluation-harness itself: its answers through our server and our model class are its own backend's.

Skipped only where it is not installed: pip install -e '.[eval]'.
"""

import subprocess
import sys
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval")

from model.data.choice_encoding import QuestionReader, encode_choices  # noqa: E402
from model.data.choice_files import read_subjects  # noqa: E402
from model.generate.scoring import score_next  # noqa: E402
from model.runtime.distributed import Ranks  # noqa: E402
from model.serve.answering import load_chat_model  # noqa: E402
from model.serve.lm_eval_model import ChatTrainerLM  # noqa: E402
from model.train.choices import likeliest_choices  # noqa: E402
from tests.judged import (  # noqa: E402
    TASKS,
    differences,
    responses,
    served,
    write_published,
    write_reciting_decoder,
    write_tasks,
)
from tests.knowing import write_knowing_model  # noqa: E402

COUNT, MOST = 20, 1e-3  # questions; difference of two log-likelihoods
ROOT = Path(__file__).resolve().parents[2]
THEIRS = dict(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, COUNT)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return write_reciting_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    write_knowing_model(folder)
    return folder


def equal(ours, theirs):
    for task, answers in ours.items():
        differ, most = differences(answers, theirs[task])
        assert len(answers) == COUNT and not differ and most < MOST, (task, differ, most)
    return True


def test_a_decoder_is_judged_through_the_server_and_the_class_as_by_the_harness_s_own_backend(tasks, decoder):
    theirs, _ = responses("hf", tasks, TASKS, THEIRS | dict(pretrained=str(decoder)))
    with served(decoder) as address:
        options = dict(base_url=address, model=str(decoder), tokenizer_backend="huggingface", max_length=1024)
        for batch in (1, 16):
            assert equal(responses("local-completions", tasks, TASKS, options | dict(batch_size=batch))[0], theirs)
    assert equal(responses("chat_trainer", tasks, TASKS, dict(pretrained=str(decoder)))[0], theirs)


def test_a_t5_is_judged_by_the_class_as_by_the_harness_s_own_backend(tasks, t5):
    theirs, _ = responses("hf", tasks, TASKS[:3], THEIRS | dict(pretrained=str(t5), backend="seq2seq"))
    assert equal(responses("chat_trainer", tasks, TASKS[:3], dict(pretrained=str(t5)))[0], theirs)


def test_what_a_t5_cannot_say_and_settings_that_nobody_reads_are_refused(tasks, t5):
    words = ["--model_args", f"pretrained={t5}", "--tasks", "made_up_rolling", "--include_path", tasks, "--limit", 1]
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "lm_eval_model.py", *map(str, words)], capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stderr.strip().endswith("choose a task with choices or generated answers"), (
        ended.stderr[-2000:]
    )
    with pytest.raises(ValueError, match="dtype='int8': must be one of"):
        ChatTrainerLM(t5, dtype="int8")
    with pytest.raises(ValueError, match="num_beams of the task.s gen"):
        ChatTrainerLM(t5)._generate(["你好"], dict(num_beams=4))


def test_choices_as_published_are_answered_as_the_harness_answers_them(tmp_path, decoder, t5):
    write_published(tmp_path, COUNT)
    (subject,) = read_subjects(tmp_path / "test", num_shots=2)
    for directory, backend in ((decoder, "causal"), (t5, "seq2seq")):
        theirs, _ = responses("hf", tmp_path, ["published"], THEIRS | dict(pretrained=str(directory), backend=backend))
        expected = [[given[0] for (given,) in question] for question in theirs["published"]]
        chat = load_chat_model(directory, "cpu")
        asked = encode_choices([subject], 2, QuestionReader(chat.tokenizer, backend == "causal", 2048))
        alone, first_id = Ranks(0, 1, 0, chat.model.device, "none", None), chat.limits(1, 1, 1).first_id
        chosen = likeliest_choices(alone, chat.model, first_id, asked, 2048)
        assert chosen.tolist() == [values.index(max(values)) for values in expected]
        values = score_next(chat.model, first_id, asked.contexts, asked.prefixes, asked.candidates)
        assert abs(values - expected).max() < MOST and not any(asked.prefixes)
