"""Predict the memory of the LoRA guides' cases, beside the guides' own figures; needs no GPU.

    python -m bench.guide_plans

Every example is taken to be as long as the case allows. Prints a table: the smallest card that a case can be planned
for, the plan under the guide's card, and what the optimizer's state takes of it.
"""

from tests.guide_cases import CASES, row_of

HEAD = ("case", "base", "rank", "batch × tokens", "the guide's GB", "smallest card, GiB", "under the guide's card",
        "optimizer's state, GiB", "8 bits would save")  # fmt: skip

if __name__ == "__main__":
    for row in (HEAD, ["---"] * len(HEAD), *map(row_of, CASES)):
        print("| " + " | ".join(row) + " |")
