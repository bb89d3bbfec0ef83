"""A step's gradient is the same on 1 to 4 ranks, and whether its micro-batches are split or merged."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.commands.option_values import load_config
from model.commands.setup import prepare_run
from model.runtime.distributed import start_ranks, stop_ranks
from model.train.step import Position, train_steps
from tests.ranks import run_ranks
from tests.tiny import OPTIONS

SPLIT = dict(micro_batch_tokens=64)


def write_gradient(name, changes):
    ranks = start_ranks("gloo", 60)
    config = load_config("pretrain", OPTIONS | dict(output_dir=name, max_grad_norm=0) | changes)
    run, state, plan = prepare_run(ranks, config, {}, resumed=False)
    result = next(train_steps(run.context, Position(plan)))
    gradient = {name: p.grad for name, p in run.model.named_parameters()}
    save_file(gradient, f"{name}.{ranks.rank}", dict(micro_batches=str(result.micro_batches)))
    stop_ranks()


def gradients(home, world, **changes):
    """The first step's reduced gradient on each rank, by parameter name."""
    name = f"gradient{world}{'_'.join(map(str, changes.values()))}"
    done = run_ranks(world, write_gradient, name, changes, folder=home)
    assert done.codes == [0] * world, done.text
    return [load_file(home / f"{name}.{rank}") for rank in range(world)]


@pytest.mark.parametrize(
    "dropout, cuttings",
    [(0.0, ((2, {}), (3, {}), (4, {}), (1, SPLIT), (2, SPLIT))), (0.2, ((3, {}), (2, SPLIT)))],
)
def test_promise_2_a_step_has_the_same_gradient_on_1_to_4_ranks_split_or_merged(home, dropout, cuttings):
    (alone,) = gradients(home, 1, dropout=dropout)
    for world, changes in cuttings:
        for gradient in gradients(home, world, dropout=dropout, **changes):
            assert gradient.keys() == alone.keys()
            for name, expected in alone.items():
                error = (gradient[name] - expected).norm() / expected.norm()
                assert error <= 1e-5, f"{name} is off by {error:.1e} on {world} ranks with {changes}"


def test_promise_2_is_tested_on_steps_that_are_really_split_and_whose_gradients_differ_by_seed(home):
    def parts(name):
        with safe_open(home / name, "pt") as file:
            return int(file.metadata()["micro_batches"])

    (other,) = gradients(home, 1, seed=5)
    (alone,) = gradients(home, 1)
    gradients(home, 1, micro_batch_tokens=64)
    assert (parts("gradient1.0"), parts("gradient164.0") > 3) == (1, True)
    assert (other["shared.weight"] - alone["shared.weight"]).norm() > 1e-2 * alone["shared.weight"].norm()


def test_promise_2_gradients_in_bf16_are_those_in_float32_to_their_rounding_on_1_to_3_ranks_split_or_merged(home):
    (alone,) = gradients(home, 1, mixed_precision="bf16", optimizer="adamw")
    for world, changes in ((1, {}), (1, SPLIT), (2, SPLIT), (3, {})):
        options = dict(mixed_precision="bf16", optimizer="adamw", master_dtype="bf16") | changes
        for gradient in gradients(home, world, share_state="False", **options):
            for name, expected in alone.items():
                error = (gradient[name].float() - expected).norm() / expected.norm()
                assert error <= 2e-2, f"{name} is off by {error:.1e} on {world} ranks with {changes}"
