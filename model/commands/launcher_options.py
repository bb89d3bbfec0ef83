"""Options typed to accelerate's launcher: those that mean the same here are taken over, the others are refused.

accelerate sets ACCELERATE_MIXED_PRECISION=no and ACCELERATE_DYNAMO_BACKEND=NO for everyone, so a no counts only where
it was typed on the launcher's command line; in a configuration file it may be the answer that nobody chose.
"""

import os
from dataclasses import fields

from config import TrainConfig
from model.commands.option_values import as_type
from model.runtime.launcher import launcher_options, read_options

SAME_HERE = dict(
    mixed_precision="mixed_precision",
    gradient_accumulation_steps="gradient_accumulation_steps",
    gradient_clipping="max_grad_norm",
)
KINDS = {field.name: field.type for field in fields(TrainConfig)}


def taken_over(words):
    """Options, as --name=value, that `words` of our own command line lack and accelerate's launcher was given.

    Raises one ValueError for all that contradict `words` or that no run can have.
    """
    launched = {name: _launched(name) for name in (*SAME_HERE, "dynamo_backend")}
    own, added, problems = read_options(words), [], _refused(launched)
    for name, here in SAME_HERE.items():
        if (value := launched[name]) is None or (name == "mixed_precision" and problems):
            continue
        if here not in own:
            added.append(f"--{here}={value}")
        elif not _is_equal(here, value, own[here]):
            problems.append(f"accelerate's --{name} {value} contradicts --{here}={own[here]}: leave one of them out")
    if problems:
        raise ValueError("cannot run with these options:" + "".join(f"\n  {problem}" for problem in problems))
    return added


def _launched(name):
    """The value that accelerate's launcher was given for its option; None if it was given none."""
    typed = launcher_options()
    # argparse takes any beginning that is the beginning of one name only
    value = next((typed[word] for word in typed if len(word) > 2 and name.startswith(word)), None)
    if value is None:
        value = os.environ.get(f"ACCELERATE_{name.upper()}")
        return None if (value or "no").lower() == "no" else value
    return value


def _refused(launched):
    """Messages for the values that no run can have."""
    precision, backend = launched["mixed_precision"], launched["dynamo_backend"]
    problems = []
    if precision and precision.lower() not in ("no", "bf16"):
        why = ", in which T5 diverges" if precision.lower() == "fp16" else ""
        problems.append(
            f"accelerate's --mixed_precision {precision}: there is no {precision} here{why}: type --mixed_precision "
            "bf16 or no, or leave it out for bf16 where the GPU has it"
        )
    if backend and backend.lower() != "no":
        problems.append(
            f"accelerate's --dynamo_backend {backend.lower()}: the network has kernels of its own and is not compiled "
            "by torch: leave it out; --compile=True after train captures steps as CUDA graphs"
        )
    return problems


def _is_equal(name, *texts):
    """Whether both texts are the same value of the option; a text that is none is left to the parser."""
    try:
        first, second = (as_type(name, text, KINDS) for text in texts)
    except ValueError:
        return True
    return first == second
