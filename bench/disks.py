"""Does a run survive a damaged checkpoint, a full disk, a read-only directory and a deleted one?

    python -m bench.disks

Damage: each file of the newest checkpoint has a byte flipped, is truncated or is deleted. The run must say so, resume
from the older checkpoint and end like an undisturbed run. Disk: while a run saves after each step, its disk (a small
tmpfs) is filled, its checkpoint directory is made read-only (a bind mount), or its whole directory is deleted. Training
must go on, the journal must have the failed saves, earlier checkpoints must stay intact, and the run must end like an
undisturbed run. Rows that need a mount say so where mounting is not allowed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.disk_trials import damage_trials, disk_trials
from tests.tiny import furnish
from tests.trials import tell, write_section


def main():
    parser = argparse.ArgumentParser(description="Damaged checkpoints, full, read-only and vanished disks.")
    parser.add_argument("--out", help="file for the JSON lines")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder))
        records = [*damage_trials(home), *disk_trials(home)]
    for record in records:
        tell(given.out, harness="disks", **record)
    rows = [[r["trial"], r["said"], f"no: {r['wrong']}" if r["wrong"] else "yes"] for r in records]
    note = (
        "`python -m bench.disks`; passed: the run continued or resumed, its sha256 and ids are the undisturbed run's."
    )
    header = ["what happened", "what the run said", "passed"]
    write_section("disks", "Damaged, full, read-only and deleted disks", header, rows, note)
    return 1 if any(record["wrong"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
