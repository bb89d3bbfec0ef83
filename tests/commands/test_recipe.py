import numpy as np
import torch

from config import MODELS
from model.commands import recipe
from model.commands.recipe import CPU_ANSWERS, answers_wanted, estimate_for, memory_spec
from model.data.length_histogram import histogram
from model.memory.estimate import Answers
from model.nn.gradient_parts import LEAST_NUMBERS
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.distributed import start_ranks, stop_ranks
from model.train.reduction import PIECE_NUMBERS, PIECES_AT_ONCE, _buffers, buffer_bytes
from tests.parts import make_config
from tests.ranks import run_ranks

CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
LENGTHS = np.random.default_rng(0).integers(20, 256, (6400, 2)).astype("uint16")


def estimate_on_unlike_gpus():
    """Ranks with GPUs of different launch speeds; returns 0 if their estimates use the lowest, else 3."""
    ranks = start_ranks("gloo", 60)
    recipe.launch_tokens_here = lambda: 9000 - 1000 * ranks.rank
    estimate = estimate_for(ranks, make_config(), CHATLM, torch.bfloat16, histogram(LENGTHS), 64)
    stop_ranks()
    return 0 if estimate.spec.launch_tokens == 8000 else 3


def test_all_ranks_use_the_lowest_launch_speed_of_their_gpus(tmp_path):
    done = run_ranks(2, estimate_on_unlike_gpus, folder=tmp_path)
    assert done.codes == [0, 0], done.text


def test_a_sum_in_bf16_holds_no_more_than_what_is_trained_takes():
    adapter, whole = (
        memory_spec(make_config(reduce_dtype="bf16", lora_rank=rank), CHATLM, torch.bfloat16) for rank in (4, 0)
    )
    most = PIECE_NUMBERS * PIECES_AT_ONCE
    assert adapter.trained < LEAST_NUMBERS
    assert 0 < adapter.trained < most < whole.trained
    assert (adapter.sum_bytes, whole.sum_bytes) == (4 * adapter.trained, 4 * most)
    assert memory_spec(make_config(), CHATLM, torch.bfloat16).sum_bytes == 0
    for numbers in (LEAST_NUMBERS - 2, LEAST_NUMBERS, PIECE_NUMBERS + 2):
        buffers = _buffers(2, numbers, torch.device("meta"))
        assert buffer_bytes(numbers) == sum(buffer.nbytes for pair in buffers for buffer in pair)


def test_a_rank_wants_its_share_of_the_answers_together_and_a_cpu_not_too_many():
    config = make_config(bleu_pairs=1000, max_new_tokens=30)
    assert answers_wanted(config, 1) == Answers(1000, 30) and answers_wanted(config, 3) == Answers(334, 30)
    assert answers_wanted(config, 3, "cpu").count == CPU_ANSWERS and answers_wanted(config, 100, "cpu").count == 10
    assert answers_wanted(make_config(bleu_pairs=0), 1).count == 1
