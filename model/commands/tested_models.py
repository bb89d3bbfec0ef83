"""Which models the command test is asked to compare. Imports no torch."""

from model.commands.option_values import as_type

SHOW = "show"  # the option that says how many answers are printed


def without_models(command, words):
    """`words` of a command line without what only the command test takes: names of models, and SHOW's value."""
    if command != "test":
        return words
    kept, takes_value = [], False
    for word in words:
        if not takes_value and word.startswith("-") and word.lstrip("-").partition("=")[0] != SHOW:
            kept.append(word)
        takes_value = word.lstrip("-") == SHOW and word.startswith("-")
    return kept


def shown_answers(options):
    """(how many answers are printed, the other `options`); ValueError for what is no number of answers."""
    number = as_type(SHOW, options.get(SHOW, 0), {SHOW: int})
    if number < 0:
        raise ValueError(f"--{SHOW}={number}: must be 0, which prints none, or above")
    if number and options.get("choices_file"):
        raise ValueError(f"--{SHOW}={number}: of questions with choices no answer is printed: leave it out")
    return number, {name: value for name, value in options.items() if name != SHOW}


def check_comparison(models, options):
    """Raise ValueError unless the models can be tested on one file."""
    if "output_dir" in options:
        named = " ".join([*models, options["output_dir"]])
        raise ValueError(f"--output_dir={options['output_dir']}: to compare its model too, type test {named}")
    if len(models) > 1 and not (options.get("test_file") or options.get("choices_file")):
        raise ValueError(f"{' '.join(models)} are compared on one file: type --test_file=FILE")
