"""The objectives by name."""

from model.data.turn_template import turn_template
from model.nn.registry import family_of
from model.train.objectives.dialogues import Dialogues
from model.train.objectives.pairs import Pairs

OBJECTIVES = {
    "pairs": lambda config: Pairs(config.z_loss, config.single_turn, config.prompt_prefix, config.label_smoothing)
}


def objective_for(config, model_config, tokenizer):
    """The Objective for a network of this configuration; where its family reads dialogues, `pairs` is Dialogues.

    The tokenizer may be None: then nothing can be encoded.
    """
    if not family_of(model_config).reads_dialogues or config.objective != "pairs":
        return objective_of(config)
    if config.prompt_prefix:
        raise ValueError(
            f"--prompt_prefix={config.prompt_prefix}: this network reads dialogues in its tokenizer's chat template: "
            "leave it out, and give the task as the system text of each dialogue"
        )
    template = turn_template(tokenizer).text if tokenizer else ""
    return Dialogues(template, config.max_seq_len, config.z_loss, config.single_turn, config.label_smoothing)


def objective_of(config):
    """The Objective that `config.objective` names; raises ValueError for an unknown name."""
    if config.objective not in OBJECTIVES:
        raise ValueError(f"--objective={config.objective}: choose one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[config.objective](config)
