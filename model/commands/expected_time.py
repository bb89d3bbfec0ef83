"""How long a run takes, in words, on this machine's GPU or on one that is named."""

import torch

from model.display.console import human_seconds
from model.memory.duration import GPUS, gpu_named


def card(gpu):
    """(name, data sheet) of the GPU of that name, or of this machine's; ("", None) where that is not known.

    Raises ValueError for a name that the table lacks.
    """
    if gpu:
        found = gpu_named(gpu)
        if not found:
            raise ValueError(f"--gpu={gpu}: choose one of {', '.join(GPUS)}")
        return found
    return (torch.cuda.is_available() and gpu_named(torch.cuda.get_device_name(0))) or ("", None)


def expected_text(gpu, step_seconds, steps):
    """How long the steps take, in words; why that is not said, where it is not known."""
    if step_seconds is None:
        return f"not known for this device; --gpu=NAME, with {', '.join(GPUS)}, says it for such a card in bf16"
    each = f"{step_seconds * 1000:,.1f} ms a step"
    total = f"about {human_seconds(step_seconds * steps)} for {steps:,.0f} steps, " if steps else ""
    return f"{total}{each} on one {gpu} or several, by its data sheet; start, evaluations and saves not counted"
