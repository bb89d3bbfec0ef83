"""How long a run and its warm-up are, in pairs and in steps: from the options, the first batch and what an epoch is."""

from config import MAX_DEFAULT_WARMUP_STEPS
from model.train.lr_schedule import warmup_problem


def global_batch(config, world_size, typed):
    """Pairs in one optimizer step over all ranks.

    `typed` holds the names of the options on the command line. Raises ValueError if they contradict each other.
    """
    product = config.batch_size_per_gpu * config.gradient_accumulation_steps * world_size
    if not config.global_batch_size:
        return product
    explicit = {"global_batch_size", "batch_size_per_gpu", "gradient_accumulation_steps"} <= set(typed)
    if explicit and product != config.global_batch_size:
        raise ValueError(
            f"--global_batch_size={config.global_batch_size} contradicts batch_size_per_gpu * "
            f"gradient_accumulation_steps * processes = {product}: leave one of them out"
        )
    return config.global_batch_size


def run_pairs(config, epoch_pairs, first_batch):
    """Pairs that a run sees. `max_steps` counts steps of `first_batch` pairs, those at the run's first start.

    So a run that goes on with another batch sees the same pairs at the same learning rates.
    """
    if not config.max_steps:
        return epoch_pairs * config.epochs
    epochs, steps = divmod(config.max_steps, -(-epoch_pairs // first_batch))
    return epochs * epoch_pairs + steps * first_batch


def run_passes(config, epoch_pairs, first_batch):
    """How often a run sees each pair; as its options say while the number of pairs is unknown."""
    if epoch_pairs:
        return run_pairs(config, epoch_pairs, first_batch) / epoch_pairs
    return 0 if config.max_steps else config.epochs


def steps_between(pairs_seen, total_pairs, epoch_pairs, batch):
    """Steps of `batch` pairs from `pairs_seen` to `total_pairs`; the last of each epoch may be smaller."""
    in_epoch = min(-pairs_seen % epoch_pairs, total_pairs - pairs_seen)
    epochs, rest = divmod(total_pairs - pairs_seen - in_epoch, epoch_pairs)
    return -(-in_epoch // batch) + epochs * -(-epoch_pairs // batch) + -(-rest // batch)


def warmup_pairs(config, total_pairs, first_batch):
    """Number of pairs over which the learning rate rises.

    The run has `total_pairs`; a warm-up given in steps counts steps of `first_batch` pairs, those at the run's start.
    """
    if config.warmup_ratio >= 0:
        return round(total_pairs * config.warmup_ratio)
    if config.warmup_steps >= 0:
        return config.warmup_steps * first_batch
    return min(total_pairs // 10, MAX_DEFAULT_WARMUP_STEPS * first_batch)


def check_warmup(config, typed, warmup_steps, num_steps):
    """Raise ValueError if --warmup_steps is in `typed`, the options given now, and the run ends within the warm-up."""
    if "warmup_steps" in typed and (problem := warmup_problem(config.learn_rate, warmup_steps, num_steps)):
        raise ValueError(problem)
