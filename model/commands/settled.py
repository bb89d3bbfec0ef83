"""What a run's options become once it is known what the run starts from: its adapter's, its optimizer, its rate."""

from config import LORA_OPTIMIZER, with_optimizer
from model.commands.adapter import with_adapter
from model.commands.options import check_learn_rate


def settled(config, typed, origin):
    """(`config` as the Origin settles it, why it has this optimizer: a key of WHY in the catalogue of texts).

    train, plan and doctor choose an optimizer here and nowhere else, so they agree:
    - One that was typed, or that a resumed run began with, stays.
    - Random weights get Muon, an adapter AdamW (`load_config` knows both before any file is read).
    - Weights that are all trained further keep the kind of update that made them, because orthogonalised updates
      degrade weights that AdamW made (arXiv 2605.10468). Muon for those that this trainer's Muon trained last, as its
      exports say; with them plan counts weights that are not on this machine, which it plans as if made here. AdamW
      for all others: downloaded models, state dicts, and what another optimizer trained last. An adapter that is
      merged changes nothing: the rule is that of its base.

    `typed` holds the names of the options on the command line. Raises ValueError for a typed learning rate that the
    chosen optimizer does not take.
    """
    why, is_open = _why(config, typed, origin), config.optimizer == "auto"
    config = with_adapter(config, origin.adapter)
    if is_open:
        config = with_optimizer(config, "adamw" if why == "others" else "muon")
        if "learn_rate" in typed:
            check_learn_rate(config)
    return config, why


def _why(config, typed, origin):
    if config.optimizer == "auto":
        if origin.weights is None:
            return "absent"
        return "muon" if origin.weights.optimizer == "muon" else "others"
    if origin.found:
        return "resumed"
    if "optimizer" in typed or (config.lora_rank and config.optimizer != LORA_OPTIMIZER):
        return "typed"
    if config.lora_rank:
        return "adapter"
    return "typed" if config.finetune_from_ckp_file else "scratch"
