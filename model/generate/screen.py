"""The likeliest token without all logits, on CPUs that multiply 8-bit integers faster than floats.

The output table is rounded to 8 bits, which a CPU reads and multiplies several times as fast. How far a rounded logit
can be from the logit is known (Cauchy-Schwarz), so only the few tokens that could be the likeliest get their logit from
the table itself. Letters: S slots, V vocabulary, D width.
"""

import functools
import time

import torch

from model.generate.sampling import blocks_of, first_of_blocks, likeliest_of
from model.nn.flat_params import product

MOST = 127  # largest code
LEAST_NUMBERS = 2**20  # of a table; rounding a smaller one is not repaid
CANDIDATES = 64  # for each slot, at most; with more the logits of all tokens take less
TRIES = 16  # calls in a row that may rule out too few tokens, before it takes all logits
NUMBERS_AT_A_TIME = 2**18  # that are rounded: they stay in the processor's cache
SLACK = 1e-4  # share of the longest vectors' product by which float32 may round a logit


class Screen:
    """Finds the likeliest tokens of at most `slots` hidden states; `table_VD` is the output projection, in float32.

    After TRIES calls in a row that rule out too few tokens, it multiplies with the whole table from then on.
    """

    def __init__(self, table_VD, slots):
        self.table_VD, self.tries_left = table_VD, TRIES
        parts = [_rounded(rows) for rows in table_VD.split(max(NUMBERS_AT_A_TIME // table_VD.shape[1], 1))]
        codes, steps, lengths, losts = zip(*parts, strict=True)
        self.codes_DV, self.steps_V = torch.cat(codes).T, torch.cat(steps)
        self.longest, self.lost = torch.stack(lengths).max(), torch.stack(losts).max()
        # held, because new memory of this size costs more than the work
        self.products_SV, self.rounded_SV = (
            torch.empty(slots, len(table_VD), dtype=dtype) for dtype in (torch.int32, torch.float32)
        )

    def likeliest(self, hidden_SD):
        """The token with the highest logit, (S,), the first of equal ones; exact to float32's rounding."""
        found = self._candidates(hidden_SD) if self.tries_left else None
        if found is None:
            self.tries_left = max(self.tries_left - 1, 0)
            return likeliest_of(hidden_SD @ self.table_VD.T)
        self.tries_left, (best, rows, tokens) = TRIES, found
        logits = self._logits(hidden_SD[rows], tokens)
        highest = logits.new_full(hidden_SD.shape[:1], -torch.inf).scatter_reduce_(0, rows, logits, "amax")
        tokens = tokens.masked_fill(logits < highest[rows], len(self.table_VD))
        return best.scatter_reduce_(0, rows, tokens, "amin", include_self=False)

    def _logits(self, hidden_ND, tokens_N):
        return (hidden_ND * self.table_VD[tokens_N]).sum(1)

    def _candidates(self, hidden_SD):
        """(best rounded token of each slot, slots and tokens of all that may be the likeliest), or None if many may."""
        step_S = _step_of(hidden_SD)
        codes_SD = (hidden_SD / step_S[:, None]).round_()
        lost_S = (hidden_SD - codes_SD * step_S[:, None]).norm(dim=1)
        error_S = hidden_SD.norm(dim=1) * (self.lost + SLACK * self.longest) + lost_S * self.longest
        products_SV, rounded_SV = self.products_SV[: len(hidden_SD)], self.rounded_SV[: len(hidden_SD)]
        torch._int_mm(codes_SD.to(torch.int8), self.codes_DV, out=products_SV)
        torch.mul(products_SV, self.steps_V, out=rounded_SV)  # logits / step_S
        blocks, width = blocks_of(rounded_SV)
        highest = blocks.amax(dim=2)
        best = first_of_blocks(blocks, highest, width)
        least_S = (self._logits(hidden_SD, best) - error_S) / step_S  # what the rounded logit of a higher one is above
        rows, numbers = (highest >= least_S[:, None]).nonzero(as_tuple=True)
        if len(rows) > CANDIDATES * len(hidden_SD):
            return None
        places, columns = (blocks[rows, numbers] >= least_S[rows, None]).nonzero(as_tuple=True)
        if len(places) > CANDIDATES * len(hidden_SD):
            return None
        return best, rows[places], numbers[places] * width + columns


def _rounded(table_VD):
    """(codes (V, D), size of each row's step (V,), longest row of codes times steps, longest of what rounding took)."""
    steps_V = _step_of(table_VD)
    rounded_VD = (table_VD / steps_V[:, None]).round_()
    codes_VD = rounded_VD.to(torch.int8)
    longest = rounded_VD.mul_(steps_V[:, None]).norm(dim=1).max()
    return codes_VD, steps_V, longest, rounded_VD.sub_(table_VD).norm(dim=1).max()


def _step_of(x):
    """The size of a code's step for each row of `x`, whose largest number gets the largest code."""
    return x.abs().amax(1).clamp(min=1e-30) / MOST


def screens(model):
    """True if a Screen finds this model's likeliest tokens faster than a product with its whole table."""
    if model.device.type != "cpu" or model.compute_dtype != torch.float32:
        return False
    if torch.are_deterministic_algorithms_enabled():  # what is faster depends on what else runs
        return False
    return model.output_weight.numel() >= LEAST_NUMBERS and multiplies_integers()


@functools.cache
def multiplies_integers():
    """True if products of 8-bit integers are right on this CPU, and take at most half as long as those of floats.

    On CPUs without instructions for them, libraries may add pairs of products in 16 bits, which overflow.
    """
    a, b = torch.full((16, 512), MOST, dtype=torch.int8), torch.full((4096, 512), -MOST, dtype=torch.int8)
    if not bool((torch._int_mm(a, b.T) == -(MOST**2) * 512).all()):
        return False
    floats = a.float(), b.float()
    return 2 * _seconds(lambda: torch._int_mm(a, b.T)) < _seconds(lambda: product(*floats))


def _seconds(work):
    """The shortest of a few times that `work()` takes."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
