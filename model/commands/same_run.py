"""Whether a checkpoint belongs to a run with these options and data."""

from model.commands.stored_options import ANOTHER_RUN

CHECKED = (("objective", "objective"), ("tokenizer", "tokenizer_fingerprint"), ("seed", "seed"))
CHECKED += (("training pairs", "num_pairs"), ("weights of the training files (pairs an epoch/pairs)", "mixture"))


def check_same_run(found, option, fresh):
    """Raise ValueError if the Checkpoint `found` does not belong to a run that begins as `fresh`.

    `option` names the training files, `fresh` is the TrainState of a new run; without ids_sha256 only the number of
    pairs is compared.
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
            f"{found.path} was written on other training pairs, or in another order, than --{option} names "
            "now, or by a version that encoded control tokens such as </s> or <think> in a text as tokens, took "
            "dialogues apart, or ended texts of large files with another EOS, where this one does not: resume with the "
            f"same pairs (--{option}=) or that version, {ANOTHER_RUN}"
        )


def why_not_compared(then, now):
    """Why the ids of the training pairs of two TrainStates cannot be compared, or "" if they can."""
    if not (then.ids_sha256 and now.ids_sha256):
        return "the checkpoint does not hold a hash of its pairs"
    if then.max_seq_len != now.max_seq_len:
        return f"max_seq_len was {then.max_seq_len}, and is {now.max_seq_len}"
    return ""
