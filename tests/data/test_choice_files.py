"""C-Eval's, CMMLU's and MMLU's files are read as published, and asked as their publications ask."""

import os
from pathlib import Path

import pytest

from model.data.choice_encoding import QuestionReader, encode_choices, letter_ids
from model.data.choice_files import CEVAL, CMMLU, MMLU, read_subjects
from tests.data.qwen_tokenizer import make_qwen_tokenizer

CEVAL_FILES = {
    "val/accountant_val.csv": "id,question,A,B,C,D,answer\n0,下列____。,甲,乙,丙,丁,B\n1,“问”,1,2,3,4,A\n",
    "dev/accountant_dev.csv": "id,question,A,B,C,D,answer,explanation\n0,例,a,b,c,d,C,1. 因为\n1,例二,e,f,g,h,D,2\n",
    "test/accountant_test.csv": "id,question,A,B,C,D\n0,问,甲,乙,丙,丁\n",
}
CMMLU_FILES = {
    "test/agronomy.csv": "\ufeff,Question,A,B,C,D,Answer\n0,问,甲,乙,丙,丁,D\n",
    "dev/agronomy.csv": ",Question,A,B,C,D,Answer\n0,例,a,b,c,d,A\n",
}
MMLU_FILES = {
    "test/abstract_algebra_test.csv": '"Find all c, in Z_3.",0,1,2,3,B\n"Two\nlines",x,y,z,w,D\n',
    "dev/abstract_algebra_dev.csv": "Example,1,2,3,4,C\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "files, part, style, prompt",
    [
        (CEVAL_FILES, "val", CEVAL,
         "以下是中国关于注册会计师考试的单项选择题，请选出其中的正确答案。\n\n例\nA. a\nB. b\nC. c\nD. d\n答案：C\n\n"
         "下列____。\nA. 甲\nB. 乙\nC. 丙\nD. 丁\n答案："),
        (CMMLU_FILES, "test", CMMLU,
         "以下是关于农学的单项选择题，请直接给出正确答案的选项。\n\n题目：例\nA. a\nB. b\nC. c\nD. d\n答案是：A\n\n"
         "题目：问\nA. 甲\nB. 乙\nC. 丙\nD. 丁\n答案是："),
        (MMLU_FILES, "test", MMLU,
         "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
         "Example\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: C\n\nFind all c, in Z_3.\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer:"),
    ],
)  # fmt: skip
def test_a_folder_is_asked_as_its_publication_asks(tmp_path, files, part, style, prompt):
    (subject,) = read_subjects(write(tmp_path, files) / part, num_shots=1)
    assert subject.style is style and subject.prompt(subject.questions[0], 1) == prompt
    file = next((tmp_path / part).iterdir())
    assert read_subjects(file)[0].questions == subject.questions and not read_subjects(file)[0].shots


def test_files_of_all_parts_may_lie_in_one_folder(tmp_path):
    flat = {name.split("/")[1]: text for name, text in CEVAL_FILES.items() if "test" not in name}
    (subject,) = read_subjects(write(tmp_path, flat), num_shots=2)
    assert (subject.name, len(subject.questions), [shot.answer for shot in subject.shots]) == ("accountant", 2, [2, 3])


@pytest.mark.parametrize(
    "name, text, shots, words",
    [
        ("a.csv", "", 0, "has no rows"), ("a.csv", "id,question,A,B,C,D,answer\n", 0, "no questions"),
        ("a.csv", "prompt,response\nx,y\n", 0, "known are C-Ev"), ("a.csv", "q,1,2,3,4,E\n", 0, "known are C-Eval's"),
        ("a.csv", "q,1,2,3,4,A\nq,1,2,3,4,\n", 0, "line 2: the answer is ''"),
        ("a.csv", "q,1,2,3,4,A\nq,1,2\n", 0, "line 2: a row of 3 columns"),
        ("a_test.csv", CEVAL_FILES["test/accountant_test.csv"], 0, "no column answer"),
        ("a.csv", "q,1,2,3,4,A\n", 5, "there is no dev file"), ("a.txt", "q", 0, "has no csv files"),
        ("val/a.csv", "q,1,2,3,4,A\n", 0, "name one of its folders"),
    ],
)  # fmt: skip
def test_what_holds_no_questions_with_an_answer_is_refused(tmp_path, name, text, shots, words):
    with pytest.raises(ValueError, match=words):
        read_subjects(write(tmp_path, {name: text}), shots)


def test_a_file_is_named_from_its_own_folder_and_what_is_no_file_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, CEVAL_FILES) / "val")
    assert len(read_subjects("accountant_val.csv", 2)[0].shots) == 2
    Path("folder.csv").mkdir()
    Path("gone.csv").symlink_to("nowhere")
    os.mkfifo("pipe.csv")
    assert [subject.name for subject in read_subjects(".")] == ["accountant"]


def test_too_few_examples_and_bytes_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has 1 examples: type --num_shots=1"):
        read_subjects(write(tmp_path, CMMLU_FILES) / "test", 5)
    (tmp_path / "x.csv").write_bytes("问,1,2,3,4,A".encode("gbk"))
    with pytest.raises(ValueError, match="no csv file in UTF-8"):
        read_subjects(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="no such file or folder"):
        read_subjects(tmp_path / "nothing")


def test_a_question_that_does_not_fit_is_asked_with_fewer_examples_and_at_last_cut(tmp_path):
    tokenizer = make_qwen_tokenizer(tmp_path / "tokenizer")
    subjects = read_subjects(write(tmp_path, CEVAL_FILES) / "val", num_shots=2)
    whole = encode_choices(subjects, 2, QuestionReader(tokenizer, True, 2048))
    assert not +whole.counts
    length = {shots: len(tokenizer.encode(subjects[0].prompt(subjects[0].questions[0], shots))) for shots in range(3)}
    for most, shots in ((length[2], 2), (length[2] - 1, 1), (length[0], 0)):
        context = encode_choices(subjects, 2, QuestionReader(tokenizer, True, most)).contexts[0]
        assert context.tolist() == tokenizer.encode(subjects[0].prompt(subjects[0].questions[0], shots))
    cut = encode_choices(subjects, 2, QuestionReader(tokenizer, True, 20))
    assert cut.counts == dict(fewer=2, cut=2) and {len(context) for context in cut.contexts} == {20}


@pytest.mark.parametrize("style", [CEVAL, CMMLU, MMLU])
def test_a_letter_s_ids_are_those_behind_the_whole_prompt(tmp_path, style):
    tokenizer = make_qwen_tokenizer(tmp_path / "tokenizer")
    prefix, ids = letter_ids(style, QuestionReader(tokenizer, True, 99))
    text = f"今天？\nA. 1\nB. 2\nC. 3\nD. 4\n{style.after}"
    for letter, token_id in zip("ABCD", ids, strict=True):
        assert tokenizer.encode(text) + prefix + [token_id] == tokenizer.encode(text + style.space + letter)
