"""The likeliest token without all logits, on CPUs that multiply 8-bit integers faster than floats.

The output table is rounded to 8 bits, which a CPU reads and multiplies several times as fast. How far a rounded logit
can be from the logit is known (Cauchy-Schwarz), so only the few tokens that could be the likeliest get their logit from
the table itself. Letters: S slots, V vocabulary, D width.
"""

import functools
import time

import torch

from model.generate.sampling import blocks_of, first_of_blocks, likeliest_of

MOST = 127  # largest code
LEAST_NUMBERS = 2**20  # of a table; rounding a smaller one is not repaid
CANDIDATES = 64  # for each slot, at most; with more the logits of all tokens take less
SLACK = 1e-4  # share of the longest vectors' product by which float32 may round a logit


class Screen:
    """Finds the likeliest tokens of at most `slots` hidden states; `table_VD` is the output projection, in float32."""

    def __init__(self, table_VD, slots):
        self.table_VD, self.steps_V = table_VD, _step_of(table_VD)
        rounded_VD = (table_VD / self.steps_V[:, None]).round_()
        self.codes_DV = rounded_VD.to(torch.int8).T
        rounded_VD.mul_(self.steps_V[:, None])
        self.longest = rounded_VD.norm(dim=1).max()  # length of a row
        self.lost = rounded_VD.sub_(table_VD).norm(dim=1).max()  # length of a row's rounding
        # held, because new memory of this size costs more than the work
        self.products_SV, self.rounded_SV = (
            torch.empty(slots, len(table_VD), dtype=dtype) for dtype in (torch.int32, torch.float32)
        )

    def likeliest(self, hidden_SD):
        """The token with the highest logit, (S,), the first of equal ones; exact to float32's rounding."""
        rows, tokens = self._candidates(hidden_SD)
        if len(rows) > CANDIDATES * len(hidden_SD):
            return likeliest_of(hidden_SD @ self.table_VD.T)
        logits = self._logits(hidden_SD[rows], tokens)
        highest = logits.new_full(hidden_SD.shape[:1], -torch.inf).scatter_reduce_(0, rows, logits, "amax")
        tokens = tokens.masked_fill(logits < highest[rows], len(self.table_VD) - 1)
        first = tokens.new_full(hidden_SD.shape[:1], len(self.table_VD) - 1)
        return first.scatter_reduce_(0, rows, tokens, "amin")

    def _logits(self, hidden_ND, tokens_N):
        return (hidden_ND * self.table_VD[tokens_N]).sum(1)

    def _candidates(self, hidden_SD):
        """(slots, tokens) of all tokens whose logit may be the highest of their slot."""
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
        places, columns = (blocks[rows, numbers] >= least_S[rows, None]).nonzero(as_tuple=True)
        return rows[places], numbers[places] * width + columns


def _step_of(x):
    """The size of a code's step for each row of `x`, whose largest number gets the largest code."""
    return x.abs().amax(1).clamp(min=1e-30) / MOST


def screens(model):
    """True if a Screen finds this model's likeliest tokens faster than a product with its whole table."""
    if model.device.type != "cpu" or model.compute_dtype != torch.float32:
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
    return 2 * _seconds(lambda: torch._int_mm(a, b.T)) < _seconds(lambda: floats[0] @ floats[1].T)


def _seconds(work):
    """The shortest of a few times that `work()` takes."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
