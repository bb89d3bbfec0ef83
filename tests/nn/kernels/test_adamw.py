"""The AdamW kernels against the optimizer's PyTorch path: on a CPU in Triton's interpreter, on a GPU as they are."""

import pytest
import torch

from tests.nn.kernels.interpreted import interpreted_errors, relative_error


def update_errors(device, sizes=(5000, 16, 4096)):
    """Relative errors of ten updates of the weights and of both averages, against the optimizer's plain path."""
    from model.nn.flat_params import FlatParams
    from model.train.adamw_rms import RMSScaledAdamW

    starts, outcomes = [torch.randn(size) for size in sizes], []
    history = [torch.randn(sum(sizes)) for _ in range(10)]
    for kernel in (True, False):
        where = device if kernel else "cpu"
        params = [torch.nn.Parameter(start.clone().to(where)) for start in starts]
        rate = torch.tensor(0.01, device=where)
        flat = FlatParams(params[:2], params[2:], [], torch.float32)  # the first two do not decay
        optimizer = RMSScaledAdamW(flat, rate, weight_decay=10.0)
        if kernel:
            optimizer.update_in_passes = optimizer.update_in_one_pass
        for step, gradients in enumerate(history):
            optimizer.gradients.copy_(gradients)
            optimizer.update(0.01, torch.tensor(0.5 if step else 1e-30, device=where))
        if kernel:  # changes nothing
            optimizer.update(0.01, torch.tensor(float("nan"), device=where))
        outcomes.append([x.cpu() for x in (optimizer.weights, optimizer.averages, optimizer.squares)])
    return [relative_error(*pair) for pair in zip(*outcomes, strict=True)]


def interpreted():
    return update_errors("cpu")


def test_the_interpreted_adamw_update_gives_the_same_as_pytorch():
    errors = interpreted_errors()["tests.nn.kernels.test_adamw"]
    assert len(errors) == 3
    assert max(errors) < 1e-5


@pytest.mark.gpu
def test_the_adamw_update_on_a_gpu_gives_the_same_as_pytorch():
    assert max(update_errors("cuda", sizes=(1_000_000, 16, 5000))) < 1e-4
