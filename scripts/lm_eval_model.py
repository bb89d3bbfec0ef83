"""lm-evaluation-harness with models that were trained here, T5s among them, as its model chat_trainer.

    python scripts/lm_eval_model.py --model_args pretrained=MODEL_DIR --tasks TASK[,TASK…] [options of lm_eval]

MODEL_DIR is a Hugging Face directory or a run directory. All options are lm_eval's own: lm_eval run --help lists them.
Needs the extra packages: pip install -e '.[eval]'
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

import torch  # noqa: E402, F401 (where it is missing all is, and the answer is another)

from model.commands.scripts_zh import SCRIPTS_ZH  # noqa: E402
from model.display.catalogue import language_of  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(SCRIPTS_ZH["lm_eval_model"][""] if language_of(os.environ) == "zh" else __doc__)
        return 0
    if find_spec("lm_eval") is None:
        print("the package lm_eval is missing: type pip install -e '.[eval]'", file=sys.stderr)
        return 2
    from lm_eval.__main__ import cli_evaluate

    from model.serve.lm_eval_model import ChatTrainerLM  # registers itself  # noqa: F401

    sys.argv = ["lm_eval", "run", "--model", "chat_trainer", *words]
    try:
        cli_evaluate()
    except ValueError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
