"""The objectives by name."""

from model.train.objectives.pairs import Pairs

OBJECTIVES = {"pairs": lambda config: Pairs(config.z_loss, config.single_turn)}


def objective_of(config):
    """The Objective that `config.objective` names; raises ValueError for an unknown name."""
    if config.objective not in OBJECTIVES:
        raise ValueError(f"--objective={config.objective}: choose one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[config.objective](config)
