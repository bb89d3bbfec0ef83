"""What a run's options become once it is known what the run starts from: its adapter's, its optimizer, its rate."""

from model.commands.adapter import with_adapter
from model.commands.options import check_learn_rate
from model.train.optim import OPEN, choose_optimizer


def settled(config, typed, origin):
    """(`config` as the Origin settles it, why it has this optimizer, as `choose_optimizer` says).

    train, plan and doctor choose an optimizer here and nowhere else, so they agree. `typed` holds the names of the
    options on the command line. Raises ValueError for a typed learning rate that the chosen optimizer does not take.
    """
    trained_by = origin.weights.optimizer if origin.weights else None
    config = with_adapter(config, origin.adapter)
    config, why = choose_optimizer(config, typed, bool(origin.found), trained_by)
    if why in OPEN and "learn_rate" in typed:
        check_learn_rate(config)
    return config, why
