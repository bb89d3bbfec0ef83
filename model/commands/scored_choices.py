"""Tests a run's model on the questions with choices of C-Eval, CMMLU or MMLU."""

from model.commands.setup import load_tested
from model.data.choice_encoding import MAX_PROMPT_TOKENS, QuestionReader, encode_choices
from model.data.choice_files import read_subjects
from model.display.choice_table import SubjectScore
from model.generate.scoring import TOKENS_AT_ONCE
from model.train.choices import likeliest_choices

ANSWER_TOKENS = 8  # places of the network that are kept for a letter


def score_choices(ranks, config, directory=None):
    """(what was asked, list of SubjectScore, notes on questions that were shortened); no scores if a stop was asked.

    The model is that in `directory`, else that of the run. A question's answer is the letter that the model finds
    likeliest behind it. Raises ValueError for files that hold no such questions.
    """
    subjects = read_subjects(config.choices_file, config.num_shots)
    recipe, tokenizer, model = load_tested(ranks, config, directory)
    most = min((model.config.max_tokens or MAX_PROMPT_TOKENS) - ANSWER_TOKENS, MAX_PROMPT_TOKENS)
    reader = QuestionReader(tokenizer, recipe.family.reads_one_stream, most, recipe.config.prompt_prefix)
    asked = encode_choices(subjects, config.num_shots, reader)
    first_id = recipe.family.first_id(model.config, tokenizer)
    chosen = likeliest_choices(ranks, model, first_id, asked, TOKENS_AT_ONCE[ranks.device.type])
    return recipe.config.finetune_from_ckp_file, [] if chosen is None else scores_of(subjects, chosen), asked.counts


ANSWER_TOKENS = 8  # places of the network that are kept for a letter


def scores_of(subjects, chosen):
    """The SubjectScore of each subject; `chosen` has the place of the choice taken, for all questions in order."""
    scores, start = [], 0
    for subject in subjects:
        answers = [question.answer for question in subject.questions]
        right = sum(int(a == b) for a, b in zip(answers, chosen[start : start + len(answers)], strict=True))
        scores.append(SubjectScore(subject.name, right, len(answers)))
        start += len(answers)
    return scores
