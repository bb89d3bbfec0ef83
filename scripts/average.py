"""Write an ordinary model directory: the mean of several models of the same sizes.

    python scripts/average.py MODEL MODEL [MODEL…] --output DIR

MODEL is a run's checkpoint (RUN_DIR/checkpoints/step_…), a Hugging Face directory or a run directory (its best/, else
its last/). Tokenizer and generation settings are the first one's. One tensor after the other is averaged in float32.
Exit codes: 0 written, 2 refused, 1 disk.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only local files are read

from model.commands.averaging import write_average  # noqa: E402
from model.commands.option_names import ScriptParser  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402


def main(words: list[str]) -> int:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    options = parser.parse_args(words)
    try:
        count = write_average(options.models, options.output)
    except (ValueError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(texts_here()("average.written", output=options.output, models=len(options.models), count=count))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
