"""What a run's options become by what it starts from and learns: its adapter's, its optimizer, rate and dropout."""

from dataclasses import replace

from config import FINE_TUNED_WIDTH, LORA_OPTIMIZER, default_learn_rate, with_optimizer
from model.commands.adapter import with_adapter
from model.commands.options import check_learn_rate
from model.nn.memory_spec import count_numbers
from model.nn.registry import family_of
from model.nn.t5.family import T5
from model.train.lr_schedule import steady_peak

# Dropout of a T5 from scratch, measured by bench.study (bench/results/study_small_data.md).
PAIR_WEIGHTS = 100  # weights for each pair, and more: then the pairs are few
FULL_PAIR_WEIGHTS = 300  # and more: then a pass gets DROPOUT_A_PASS; with fewer it gets less
MANY_PASSES, DROPOUT_A_PASS, MOST_DROPOUT = 3, 0.025, 0.2
OPEN = ("absent", "muon", "others")  # reasons of a choice that waits for the weights


def settled(config, typed, origin):
    """(`config` as the Origin settles it, why it has this optimizer, as `choose_optimizer` says).

    train, plan and doctor choose an optimizer here and nowhere else, so they agree. `typed` holds the names of the
    options on the command line. Raises ValueError for a typed learning rate that the chosen optimizer does not take.
    """
    trained_by = origin.weights.optimizer if origin.weights else None
    config = with_adapter(config, origin.adapter)
    config, why = choose_optimizer(config, typed, bool(origin.found), trained_by)
    if config.optimizer == "adamw" and config.finetune_from_ckp_file and not config.lora_rank and not origin.found:
        config = config if "learn_rate" in typed else replace(config, learn_rate=_fine_tuning_rate(config, origin))
    if why in OPEN and "learn_rate" in typed:
        check_learn_rate(config)
    return config, why


def _fine_tuning_rate(config, origin):
    """AdamW's default peak here: its best rate falls with the width (Yang et al. 2022, arXiv 2203.03466)."""
    return default_learn_rate(config) * min(FINE_TUNED_WIDTH / origin.model_config.width, 1)


def choose_optimizer(config, typed, is_resumed, trained_by):
    """(`config` with an optimizer and its rate, why it has this one: a key of the catalogue of texts after `why.`).

    - One that was typed, or that a resumed run began with, stays.
    - Random weights get Muon, an adapter AdamW; `load_config` knows both before any file is read.
    - Weights that are all trained further keep the kind of update that made them, because orthogonalised updates
      degrade weights that AdamW made (arXiv 2605.10468). `trained_by` is the optimizer of this trainer that trained all
      of them last, as its exports say. Muon's keep Muon; so do weights that are not on this machine (None), which plan
      takes for made here. All others get AdamW: downloaded models, state dicts, what another optimizer trained last. A
      merged adapter changes nothing: its base's optimizer counts.
    """
    if config.optimizer == "auto":
        why = "absent" if trained_by is None else "muon" if trained_by == "muon" else "others"
        return with_optimizer(config, "adamw" if why == "others" else "muon"), why
    if is_resumed:
        return config, "resumed"
    if "optimizer" in typed or (config.lora_rank and config.optimizer != LORA_OPTIMIZER):
        return config, "typed"
    if config.lora_rank:
        return config, "adapter"
    return config, "typed" if config.finetune_from_ckp_file else "scratch"


def with_rate(config, typed, origin, num_steps):
    """`config`, whose default learning rate is lowered where it is too high for a run of `num_steps`.

    That holds for the optimizers whose steps are relative to the weights. None: the number of steps is not known yet.
    """
    if "learn_rate" in typed or origin.found or not num_steps or config.optimizer == "adamw":
        return config
    steady = float(f"{steady_peak(config.lr_schedule, num_steps):.3g}")
    return replace(config, learn_rate=min(config.learn_rate, steady))


def with_dropout(config, origin, num_pairs, passes):
    """(`config` with its dropout, why: a key of the catalogue of texts after `dropout.`, "" where nothing was chosen).

    A T5 from scratch that reads few pairs many times learns them by heart: it gets dropout in proportion to the passes
    over the `num_pairs` pairs. Below FULL_PAIR_WEIGHTS it also falls with the square root of the weights for each pair.
    All other networks get none unless it was typed.
    """
    if config.dropout != -1:
        return config, ""
    family = family_of(origin.model_config)
    if config.finetune_from_ckp_file or config.lora_rank or family is not T5:
        return replace(config, dropout=0.0), ""
    if passes < MANY_PASSES:
        return replace(config, dropout=0.0), "seldom"
    pair_weights = count_numbers(family, origin.model_config).weights / max(num_pairs, 1)
    if pair_weights < PAIR_WEIGHTS:
        return replace(config, dropout=0.0), "many"
    a_pass = DROPOUT_A_PASS * min(pair_weights / FULL_PAIR_WEIGHTS, 1) ** 0.5
    return replace(config, dropout=round(min(passes * a_pass, MOST_DROPOUT), 3)), "few"
