"""What computed a result: the device, and the versions of the libraries."""

import sys
from importlib.metadata import version

import torch


def device_name(device):
    """Name of a GPU, or of the CPU with its number of threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def versions():
    """{name: version} of Python, CUDA and the libraries that compute."""
    python = ".".join(map(str, sys.version_info[:3]))
    libraries = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return dict(python=python, cuda=torch.version.cuda, **libraries)
