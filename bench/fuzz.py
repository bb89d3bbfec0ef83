"""Gives mutated inputs to every reader: each must raise a clear ValueError of this project or read correctly.

    python -m bench.fuzz [--inputs 12000] [--seed 0] [--only TARGET]

tests/fuzz makes and judges the inputs. Replaces the table in bench/results/faults.md unless --only is given.
"""

import argparse
import sys
import time
from collections import Counter

from tests.fuzz.judge import GOOD, OUTCOMES, fuzz
from tests.fuzz.targets import TARGETS
from tests.trials import typed, write_section


def main():
    """Fuzz all targets and print the failures; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TARGETS)
    options = parser.parse_args()
    started, counts = time.monotonic(), {}
    for name in [options.only] if options.only else TARGETS:
        found = fuzz(name, -(-options.inputs // len(TARGETS)), options.seed)
        counts[name] = Counter(outcome for _, outcome, _ in found)
        print(name, dict(counts[name]), flush=True)
        for number, outcome, detail in found:
            if outcome not in GOOD:
                print(f"--- {name} {number}: {outcome}\n{detail}", flush=True)
    total = sum(counts.values(), Counter())
    if not options.only:
        rows = [[name, *(f"{counter[x]:,}" for x in OUTCOMES)] for name, counter in (*counts.items(), ("all", total))]
        note = (
            f"`{typed('bench.fuzz')}`: {total.total():,} inputs in {time.monotonic() - started:.0f} s. Refused: this "
            "project raised a ValueError. Correct: read, and equal to the original or to another reader's result."
        )
        write_section("fuzz", "Mutated inputs", ["input", *OUTCOMES], rows, note)
    return any(total[outcome] for outcome in OUTCOMES if outcome not in GOOD)


if __name__ == "__main__":
    sys.exit(main())
