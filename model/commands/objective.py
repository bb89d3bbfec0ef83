"""The objectives by name."""

from dataclasses import replace

from config import BETAS, TrainConfig
from model.commands.run_files import PREFERENCES, USERS, named_objectives, unused_options
from model.data.span_noise import Noise
from model.data.tokenizer import SENTINEL
from model.data.turn_template import turn_template
from model.nn.loss_terms import LossTerms
from model.nn.registry import family_of
from model.train.objectives.dialogues import Dialogues
from model.train.objectives.mixed import Mixed
from model.train.objectives.pairs import Pairs
from model.train.objectives.preference_dialogues import DialogueForm
from model.train.objectives.preference_losses import PreferenceLoss
from model.train.objectives.preference_pairs import PairForm
from model.train.objectives.preferences import Preferences
from model.train.objectives.prefix import Prefix
from model.train.objectives.spans import Spans
from model.train.objectives.text import Text


def loss_terms(config):
    """The LossTerms of a TrainConfig."""
    against_loops = "" if config.against_loops == "none" else config.against_loops
    return LossTerms(
        config.z_loss, config.label_smoothing, config.distill_weight if config.teacher else 0.0,
        config.distill_temperature, against_loops, config.loops_weight, config.loops_ngram,
    )  # fmt: skip


def _pairs(config, family=None, tokenizer=None):
    """Pairs or, where the family reads dialogues, Dialogues."""
    if not (family and family.reads_dialogues):
        return Pairs(loss_terms(config), config.single_turn, config.prompt_prefix)
    return Dialogues(
        _template_of(config, tokenizer), config.max_seq_len, loss_terms(config), config.single_turn,
        config.learn_empty_thoughts,
    )  # fmt: skip


def _template_of(config, tokenizer):
    """The text of the tokenizer's chat template; ValueError for a prompt_prefix, which has no place in it."""
    if config.prompt_prefix:
        raise ValueError(
            f"--prompt_prefix={config.prompt_prefix}: this network reads dialogues in its tokenizer's chat template: "
            "leave it out, and give the task as the system text of each dialogue"
        )
    return turn_template(tokenizer).text if tokenizer else ""


def _preferences(config, family=None, tokenizer=None):
    kind = config.dpo_loss if config.objective == "dpo" else config.objective
    if config.label_smoothing and (kind in ("ipo", "orpo") or config.label_smoothing >= 0.5):
        raise ValueError(
            f"--label_smoothing={config.label_smoothing:g}: of preferences it is the share that is wrong: "
            f"below 0.5, for --objective=simpo and --objective=dpo --dpo_loss=sigmoid, and here is {kind}"
        )
    is_mean = config.normalize_length or kind != "sigmoid"
    gamma = config.gamma if kind == "simpo" else 0.0
    beta = config.beta or BETAS[config.objective]
    loss = PreferenceLoss(kind, beta, gamma, config.label_smoothing, is_mean)
    form = PairForm(config.prompt_prefix, shares_source=not (family and family.reads_one_stream))
    if family and family.reads_dialogues:
        form = DialogueForm(_template_of(config, tokenizer), config.learn_empty_thoughts)
    return Preferences(form, loss, config.sft_weight, config.rejected_loops_weight)


def _text(config, family=None, tokenizer=None):
    if family and not family.reads_one_stream:
        raise ValueError(
            "objective text: this network has an encoder, which would read what the decoder is to predict: take span, "
            "or prefix"
        )
    return Text(loss_terms(config))


def _span(config, family=None, tokenizer=None):
    if family and family.reads_one_stream:
        raise ValueError("objective span: this network has no encoder to read a text with gaps: take text, or prefix")
    noise = Noise(config.span_density, config.span_mean)
    spans = Spans(loss_terms(config), noise, config.max_seq_len)
    if tokenizer is None:
        return spans
    return replace(spans, sentinels=_sentinels(tokenizer, spans), eos_id=tokenizer.eos_id)


def _prefix(config, family=None, tokenizer=None):
    has_encoder = family is not None and not family.reads_one_stream
    eos_id = (tokenizer.eos_id if tokenizer else 0) if has_encoder else None
    return Prefix(loss_terms(config), eos_id)


OBJECTIVES = {"pairs": _pairs, "text": _text, "span": _span, "prefix": _prefix}
OBJECTIVES |= dict.fromkeys(PREFERENCES, _preferences)


def _sentinels(tokenizer, spans):
    """Ids of the sentinels of the longest chunk; ValueError where the tokenizer has fewer."""
    needed = int(spans.noise.amounts([spans.chunk_tokens])[1][0])
    ids = [tokenizer.backend.token_to_id(SENTINEL.format(number)) for number in range(needed)]
    if None not in ids:
        return tuple(ids)
    raise ValueError(
        f"the tokenizer in {tokenizer.directory} has {ids.index(None)} sentinels (<extra_id_0>, …), and a text of "
        f"{spans.chunk_tokens} tokens needs {needed}, one for each span: train one with python "
        f"scripts/train_tokenizer.py FILES --output_dir DIR --sentinels={needed}, or lower --max_seq_len"
    )


def objectives_for(config, model_config=None, tokenizer=None):
    """{name: the Objective of this name, for a network of this configuration} of all that the options name.

    Without a tokenizer nothing can be encoded; without a network either, files can be read. Raises ValueError for
    unknown names, and for options that none of the objectives uses.
    """
    names, family = named_objectives(config), model_config and family_of(model_config)
    if unknown := [name for name in names if name not in OBJECTIVES]:
        raise ValueError(f"--objective={unknown[0]}: choose one of {', '.join(OBJECTIVES)}")
    for name in unused_options(config):
        if name in USERS and getattr(config, name) != getattr(TrainConfig, name):
            raise ValueError(
                f"--{name}={getattr(config, name)}: the objective {' or '.join(USERS[name])} uses it, and here is only "
                f"{', '.join(names)}: leave it out"
            )
    return {name: OBJECTIVES[name](config, family, tokenizer) for name in names}


def objective_on(objectives, files):
    """The objective of these DataFiles; that of several with different ones is Mixed."""
    parts = tuple(objectives[file.objective] for file in files)
    return parts[0] if len({file.objective for file in files}) == 1 else Mixed(parts)


def on_rows(objective, rows_of_files):
    """The objective of the rows of files, of which each has so many."""
    return replace(objective, rows=tuple(rows_of_files)) if isinstance(objective, Mixed) else objective
