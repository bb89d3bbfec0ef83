"""Do answers use earlier turns? Trains on dialogues whose last answer stands in an earlier turn, and holds new ones.

    python -m bench.turns [--dialogues 800] [--epochs 3] [--folder DIR]

The dialogues are those of tests/turns.py. Prints five whole conversations and the share of right last answers; exit
code 1 below 95 %.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from model.serve.answering import load_chat_model
from tests.turns import MIN_SHARE, NUM_TESTED, made_up, shares_right, talk, train

NUM_SHOWN = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dialogues", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep what is written here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        chat = load_chat_model(train(options.folder or Path(scratch), options.dialogues, options.epochs))
    tested = made_up(NUM_TESTED, 2, True)
    talks = talk(chat, tested)
    for turns in talks[:NUM_SHOWN]:
        print("  ".join(text for _, text in turns))
    share, alone = shares_right(chat, tested, talks)
    print(f"right last answers: {share:.1%} of {NUM_TESTED}; without the earlier turns {alone:.1%}")
    return 0 if share >= MIN_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
