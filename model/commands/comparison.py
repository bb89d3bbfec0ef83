"""The command test: one model's figures on a file, or those of several beside each other, with their answers."""

from dataclasses import asdict, replace

from config import TrainConfig
from model.commands.options import parse_options, read_request
from model.commands.run_events import say
from model.commands.run_files import not_of_pairs
from model.commands.scored_choices import score_choices
from model.commands.setup import prepare_test
from model.commands.summary import data_text
from model.display.catalogue import texts_here
from model.display.choice_table import subject_lines, subject_table, sum_lines
from model.display.model_table import answer_lines, comparison_lines
from model.formats.adapters import weights_directory
from model.formats.carried import GENERATION_FILE, carried_values, record_of
from model.run.run_dir import is_run
from model.runtime.device_memory import release_memory
from model.runtime.distributed import from_main
from model.train.evaluate import measure

ALIKE = ("bleu_pairs", "max_new_tokens", "no_repeat_ngram_size")  # of all models the same: their figures depend on it


def test_models(ranks, request, models, shown):
    """Test the `models`, names of directories, beside each other; without them that of a CommandLine's run."""
    if request.config.choices_file:
        ask_choices(ranks, request, models)
    elif models:
        compare(ranks, models, request.given, shown)
    else:
        test_run(ranks, request, shown)


def test_run(ranks, request, shown):
    """Say the figures of the model of a CommandLine's run on its test_file, and print the first `shown` answers."""
    name, measured = measure_model(ranks, request.config, request.typed)
    if measured:
        scores, answers = measured
        text = texts_here()
        figures = ", ".join(f"{text.get(f'label.{label}', label)} {value:.4f}" for label, value in scores.items())
        say(ranks, text("test.figures", model=name, figures=figures))
        _print(ranks, answer_lines({name: answers}, shown, text) if shown else [])


def ask_choices(ranks, request, models):
    """Say how many questions with choices each of the `models` answers, without them the model of a CommandLine's run.

    Of several models a table of the subjects is printed. Says nothing if a stop was asked.
    """
    scores, lines = {}, []
    for name in models or [""]:
        config, directory = request.config, None
        if name:
            values, directory = from_main(ranks, options_of, name, request.given)
            config = TrainConfig(**values)
        tested, scores[name], shortened = score_choices(ranks, config, directory)
        if not scores[name]:
            return
        lines += sum_lines(tested, scores[name], shortened)
        release_memory()
    if len(scores) > 1:
        _print(ranks, subject_table(scores))
    else:
        lines = subject_lines(*scores.values()) + lines
    for line in lines:
        say(ranks, line)


def compare(ranks, models, options, shown):
    """Print a table of the `models`, names of directories, on one file, and the first `shown` of their answers.

    `options` are those of the command line as texts. Prints nothing if a stop was asked.
    """
    scores, answers = {}, {}
    for name in models:
        values, directory = from_main(ranks, options_of, name, options, len(models) > 1)
        _, measured = measure_model(ranks, TrainConfig(**values), options.keys(), directory)
        if measured is None:
            return
        scores[name], answers[name] = measured
        release_memory()
    text, references = texts_here(), [{each.reference for each in of_model} for of_model in answers.values()]
    lines = comparison_lines(scores, text)
    if any(of_model != references[0] for of_model in references):
        lines.append(text("test.unlike"))
    _print(ranks, lines + answer_lines(answers, shown, text))


def measure_model(ranks, config, typed, directory=None):
    """(name of the model's directory, what `measure` gives of it), and says of which data."""
    run, plan = prepare_test(ranks, config, typed, directory)
    measured = measure(run.evaluation, plan)
    if measured:
        text = texts_here()
        say(ranks, text("test.data", data=data_text(run.evaluation.examples, text)))
    return run.config.finetune_from_ckp_file, measured


def options_of(name, options, is_compared=False):
    """(values of the TrainConfig that the model `name` is tested with, its directory).

    Those of its run if it is of one, else the defaults and what its generation_config.json says of questions; what was
    typed replaces both. A model that `is_compared` with others answers pairs, whatever it has learnt, unless an
    objective was typed. Raises ValueError if there is no model.
    """
    directory = weights_directory(name)
    if directory is None:
        raise ValueError(
            f"{name}: no model is there to test: name a run directory with best/ or last/, or a model's directory"
        )
    run_dir = next((folder for folder in (directory, directory.parent) if is_run(folder)), None)
    if run_dir:
        config = read_request((), options | dict(output_dir=str(run_dir)), True).config
    else:
        config = _config_of_model(directory, options)
    alike = ALIKE if not is_compared or "objective" in options else (*ALIKE, "objective", "mix", *not_of_pairs())
    fresh = {field: getattr(TrainConfig, field) for field in (*alike, "best_metric") if field not in options}
    return asdict(replace(config, output_dir=str(run_dir or directory), **fresh)), str(directory)


def _config_of_model(directory, options):
    """The TrainConfig of a model that no run is known of."""
    values = carried_values(directory, GENERATION_FILE) or {}
    known = dict(prompt_prefix=values.get("prefix") or "", single_turn=record_of(values).get("single_turn") is True)
    return parse_options((), {name: str(value) for name, value in known.items()} | options).config


def _print(ranks, lines):
    if ranks.is_main and lines:
        print("\n".join(lines), flush=True)
