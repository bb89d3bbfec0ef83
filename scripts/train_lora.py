"""Train a LoRA adapter from a guide's command line: flags of transformers, PEFT and bitsandbytes.

    python scripts/train_lora.py --model_name_or_path Qwen/Qwen1.5-7B-Chat --data_path ./data/dataset \\
        --output_dir ./output --use_4bit --bf16 --num_train_epochs 3 --per_device_train_batch_size 1 \\
        --gradient_accumulation_steps 16 --learning_rate 2e-4 --lora_rank 32 --lora_alpha 64 --save_steps 500 \\
        --max_seq_length 1024 --logging_steps 10 --dataloader_num_workers 2
    python scripts/train_lora.py plan|doctor ...          what it would take, or what would fail, with the same flags
    accelerate launch --multi_gpu --num_processes 2 scripts/train_lora.py ...       also under torchrun

Prints what each flag is here, then becomes train_low_mem.py with these options; those work here too, see
docs/options.md. The same command goes on with a run that was stopped. A model that is no directory is looked for among
Hugging Face's and ModelScope's downloads; nothing is downloaded.
"""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

from model.commands.guide_flags import read_guide  # noqa: E402
from model.commands.scripts_zh import SCRIPTS_ZH  # noqa: E402
from model.display.catalogue import language_of  # noqa: E402
from model.runtime.launcher import typed_command  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402

COMMANDS = ("train", "plan", "doctor")


def main(words: list[str]) -> int:
    """Replace this process by the run; returns 0 after --help, 2 if there are problems."""
    is_main = os.environ.get("RANK", "0") == "0"  # every rank reads the same words
    if {"-h", "--help"} & set(words):
        print(SCRIPTS_ZH["train_lora"][""] if language_of(os.environ) == "zh" else __doc__)
        return 0
    command = words.pop(0) if words and words[0] in COMMANDS else "train"
    try:
        options, told = read_guide(words)
    except ValueError as error:
        if is_main:
            print(printable_lines(str(error)), file=sys.stderr)
        return 2
    if is_main:
        print(printable_lines("\n".join(told)), flush=True)
    os.environ["CHAT_COMMAND"] = shlex.join(typed_command())  # goes on with a run that was stopped
    line = [command, *(f"--{name}={value}" for name, value in options.items())]
    os.execv(sys.executable, [sys.executable, str(ROOT / "train_low_mem.py"), *line])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
