"""What a process does now is known to its other threads."""

from model.display.console import Progress
from model.runtime.activity import Activity, advance, current_activity, now_doing
from model.train.evaluate import answer_questions, evaluate_loss
from tests.parts import PLAN, evaluation_of


def test_progress_is_the_activity_even_where_it_is_not_shown():
    with Progress("tokenising a.jsonl", None, unit="rows", shown=False) as progress:
        progress.update(12)
        assert current_activity() == Activity("tokenising a.jsonl", 12, None)


def test_an_evaluation_counts_its_examples(model, store, tokenizer):
    now_doing("training", 3, 9)
    evaluate_loss(evaluation_of(model, store, tokenizer), PLAN)
    assert current_activity() == Activity("evaluating", len(store), len(store))


def test_answers_are_counted(model, store, tokenizer):
    answer_questions(evaluation_of(model, store, tokenizer, num_answers=5, max_new_tokens=2), PLAN)
    assert current_activity() == Activity("answering", 5, 5)


def test_an_advance_adds_to_what_is_done():
    now_doing("evaluating", 1, 9)
    advance(3)
    assert current_activity().done == 4
