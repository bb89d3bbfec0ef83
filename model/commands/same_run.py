"""Whether a checkpoint belongs to a run with these options and data."""

from model.commands.options import ANOTHER_RUN
from model.nn.lora import lora_values
from model.nn.registry import config_values
from model.run.train_state import TrainState

CHECKED = (("objective", "objective"), ("tokenizer", "tokenizer_fingerprint"), ("seed", "seed"))
CHECKED += (("training pairs", "num_pairs"), ("weights of the training files (pairs an epoch/pairs)", "mixture"))


def new_state(recipe, tokenizer, train, mixture, validation=None):
    """TrainState before the first step of a run on the TokenStore `train`, evaluated on `validation` (or nothing).

    An empty `train` stands for pairs that are unknown.
    """
    config, lora = recipe.config, recipe.spec.lora
    return TrainState(
        first_batch=recipe.global_batch, seed=config.seed, num_pairs=len(train),
        ids_sha256=train.meta["ids_sha256"] if train else "", max_seq_len=config.max_seq_len,
        shape=config_values(recipe.model_config), lora=lora and lora_values(lora),
        tokenizer_fingerprint=tokenizer.fingerprint, world_size=recipe.machine.num_processes,
        validation=validation.identity if validation else "", objective=config.objective,
        best_metric=recipe.rules.best_metric, mixture=mixture.identity if mixture else "",
    )  # fmt: skip


def check_same_run(found, train_file, fresh):
    """Raise ValueError if the Checkpoint `found` does not belong to a run on `train_file` that begins as `fresh`.

    `fresh` is the TrainState of a new run; without ids_sha256 only the number of pairs is compared.
    """
    then = found.state
    for what, name in CHECKED:
        if getattr(then, name) != getattr(fresh, name):
            raise ValueError(
                f"{found.path} was written with {what} {getattr(then, name)}, now {getattr(fresh, name)}: "
                f"resume with the same, {ANOTHER_RUN}"
            )
    if not why_not_compared(then, fresh) and then.ids_sha256 != fresh.ids_sha256:
        raise ValueError(
            f"{found.path} was written on other training pairs, or in another order, than {train_file} holds "
            "now, or by a version that encoded control tokens such as </s> or <think> in a text as tokens, where this "
            f"one encodes them as text: resume with the same pairs (--train_file=) or that version, {ANOTHER_RUN}"
        )


def why_not_compared(then, now):
    """Why the ids of the training pairs of two TrainStates cannot be compared, or "" if they can."""
    if not (then.ids_sha256 and now.ids_sha256):
        return "the checkpoint does not hold a hash of its pairs"
    if then.max_seq_len != now.max_seq_len:
        return f"max_seq_len was {then.max_seq_len}, and is {now.max_seq_len}"
    return ""
