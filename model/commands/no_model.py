"""What to type where no model is: for weights to start from, and for the model that is tested."""

from pathlib import Path

from model.commands.model_cache import how_to_get
from model.formats.adapters import weights_directory
from model.run.checkpoint import checkpoint_paths
from model.run.run_dir import is_exported, is_run


def check_source(source):
    """Raise ValueError if the path `source` is that of a run without a model, or is a model's name in a hub."""
    path = Path(source)
    if path.is_file() or weights_directory(path):
        return
    run_dir = path.parent if path.name in ("best", "last") else path
    if hint := _of_run(run_dir) if is_run(run_dir) else how_to_get(source):
        raise ValueError(f"finetune_from_ckp_file={source}: no model there; {hint}")


def _of_run(run_dir):
    """How to get a model of a run that lacks the one asked for."""
    if is_exported(last := run_dir / "last"):
        return f"the run in {run_dir} has last/ and no best/ yet: type --finetune_from_ckp_file={last}"
    if checkpoint_paths(run_dir):
        return (
            f"the run in {run_dir} was stopped before its first evaluation, which writes best/: go on with it: "
            f"{_go_on(run_dir)}"
        )
    return f"the run in {run_dir} was stopped before its first checkpoint: train it again"


def _go_on(run_dir):
    return f"python train_low_mem.py train --output_dir={run_dir} --is_keep_training=True"


def check_tested(config):
    """The directory of the model that the command test takes, as text: best/, or last/ of a run without evaluations.

    Raises ValueError if no model is there.
    """
    run_dir = Path(config.output_dir)
    tested, last = run_dir / ("best" if config.validation_file else "last"), run_dir / "last"
    if is_exported(tested):
        return str(tested)
    missing = f"--output_dir={run_dir}: there is no {tested} to test"
    if is_exported(last):
        # options that need a validation file
        others = "".join(f" --{name}=0" for name in ("eval_steps", "early_stop") if getattr(config, name))
        file = config.test_file or config.validation_file
        raise ValueError(
            f"{missing}, the run was not evaluated yet: to test last/ type --validation_file= --test_file={file}"
            f"{others}, or go on with the run: {_go_on(run_dir)}"
        )
    if checkpoint_paths(run_dir):
        raise ValueError(f"{missing}: {_of_run(run_dir)}")
    raise ValueError(
        f"{missing}: train first; if the run exists, resume it with --is_keep_training=True: the next evaluation "
        "writes best/, the end last/"
    )
