"""How long a run takes, in words, on this machine's GPU or on one that is named."""

import torch

from model.display.catalogue import texts_here
from model.display.console import duration
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
    text = texts_here()
    if step_seconds is None:
        return text("time.unknown", names=", ".join(GPUS))
    total = text("time.total", time=duration(step_seconds * steps, text), steps=steps) if steps else ""
    return text("time.expected", total=total, each=step_seconds * 1000, gpu=gpu)
