"""Talk with a trained model: it answers questions typed in the terminal or read from a pipe, one per line.

    python scripts/chat.py [MODEL_DIR] [--temperature 0.7] [--top_p 0.9] [--max_new_tokens 256]
    python scripts/chat.py model_save/sft_fast < questions.txt > answers.txt

MODEL_DIR is a Hugging Face T5 directory or a run directory; default: the newest model_save/*/best.
In the terminal exit, quit, Ctrl+D and Ctrl+C end the program; cls clears the screen.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: only local files are read

import torch  # noqa: E402
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration, TextStreamer  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

from model.data.cleaning import clean_text  # noqa: E402
from model.data.tokenizer import ChatTokenizer, load_tokenizer  # noqa: E402
from model.nn.t5.huggingface import ALIASES, COMPUTED  # noqa: E402
from model.nn.weights_io import LoadedWeights, check_fits, read_config, read_tensors  # noqa: E402
from model.runtime.terminal import printable  # noqa: E402

with suppress(ImportError):
    import readline  # noqa: F401  # gives input() a history and correct deletion of wide characters

MAX_QUESTION_TOKENS = 2048  # the encoder's memory grows with the square of the length
CLEAR_SCREEN = "\033[2J\033[3J\033[H"


@dataclass(frozen=True)
class WholeCharacters:
    """Tokenizer for a streamer: decodes a character only when all its bytes are there."""

    tokenizer: ChatTokenizer

    def decode(self, ids: list[int]) -> str:
        # An incomplete character makes all byte tokens before it undecodable, so ids are cut off and not text.
        texts = (self.tokenizer.decode(ids[: len(ids) - missing]) for missing in range(4))
        return next((text for text in texts if not text.endswith("\ufffd")), "")


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        generation = generation_options(options)
        directory = find_model(options.model_dir) if options.model_dir else newest_model()
        model, tokenizer = load_model(directory)
        prepare_streams()
        if interactive:
            print(f"{directory} on {model.device}; exit, quit or Ctrl+D ends the program, cls clears the screen")
        for question in read_questions(interactive):
            answer(model, tokenizer, question, generation)
    except ValueError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path)
    parser.add_argument("--temperature", type=float, help="sampling temperature, above 0; default: greedy decoding")
    parser.add_argument("--top_p", type=float, help="nucleus sampling: total probability, above 0 and at most 1")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="most tokens in an answer")
    return parser.parse_args(argv)


def generation_options(options: argparse.Namespace) -> dict:
    """Keyword arguments of generate(); greedy unless temperature or top_p is given.

    Raises ValueError for numbers out of range.
    """
    temperature, top_p = options.temperature, options.top_p
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(f"--temperature={temperature:g}: must be above 0; leave it out for greedy decoding")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top_p={top_p:g}: must be above 0 and at most 1, for example --top_p 0.9")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens={options.max_new_tokens}: must be at least 1")
    common = dict(max_new_tokens=options.max_new_tokens, num_beams=1)
    if temperature is None and top_p is None:
        return common | dict(do_sample=False)
    return common | dict(do_sample=True, temperature=temperature or 1.0, top_p=top_p or 1.0, top_k=0)


def find_model(path: Path) -> Path:
    """The first of `path`, best/ and last/ in it that holds a model. Raises ValueError if none does."""
    for directory in (path, path / "best", path / "last"):
        if (directory / "config.json").is_file() and (directory / "model.safetensors").is_file():
            return directory
    raise ValueError(
        f"no model in {path}: name a Hugging Face directory (config.json and model.safetensors) or a run directory "
        "with best/ or last/, for example model_save/sft_fast"
    )


def newest_model() -> Path:
    """The newest model_save/*/best in the current directory or the project. Raises ValueError if there is none."""
    found = {path for folder in (Path.cwd(), ROOT) for path in folder.glob("model_save/*/best/model.safetensors")}
    if not found:
        raise ValueError("no model_save/*/best here: name the model's directory, or train a model first")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def load_model(directory: Path) -> tuple[T5ForConditionalGeneration, ChatTokenizer]:
    """transformers' T5, on the GPU if there is one, and its tokenizer. Raises ValueError for damaged or misfit files.

    This project's readers open the files, not transformers: they limit what a hostile file can allocate or run.
    """
    tokenizer = load_tokenizer(directory)
    config = t5_config(directory / "config.json", tokenizer)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(decoder_start_token_id=config.decoder_start_token_id)
    tensors = read_tensors(directory / "model.safetensors")
    if "shared.weight" in tensors:
        tensors = {alias: tensors["shared.weight"] for alias in ALIASES} | tensors
    weights = LoadedWeights({name: tensor.float() for name, tensor in tensors.items()}, None, directory)
    check_fits(model, weights, directory)
    model.load_state_dict(weights.tensors, assign=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def t5_config(path: Path, tokenizer: ChatTokenizer) -> T5Config:
    """T5Config of a config.json. Raises ValueError if transformers cannot build a T5 from it."""
    _, model_config, values = read_config(path)
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"{path}: the model has {model_config.vocab_size} tokens and the tokenizer beside it "
            f"{tokenizer.vocab_size}: copy the tokenizer files that the model was trained with"
        )
    computed = {name: values[name] for name in COMPUTED if name in values} | dict(is_encoder_decoder=True)
    for name, prefix in (("feed_forward_proj", "gated-"), ("dense_act_fn", "")):
        if computed.get(name, "relu").removeprefix(prefix) not in ACT2FN:
            raise ValueError(f"{path} has {name}={computed[name]!r:.80}: transformers has no such activation")
    start = values.get("decoder_start_token_id")
    if start is None:
        start = tokenizer.pad_id
    if type(start) is not int or not 0 <= start < model_config.vocab_size:
        raise ValueError(
            f"{path} has decoder_start_token_id={start!r:.80}: it must be an integer from 0 to "
            f"{model_config.vocab_size - 1}"
        )
    return T5Config(**asdict(model_config), **computed, decoder_start_token_id=start)


def prepare_streams() -> None:
    """Replace characters that cannot be decoded or encoded, and end the program when the output pipe is closed."""
    sys.stdin.reconfigure(errors="replace")
    sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def read_questions(interactive: bool) -> Iterator[str]:
    """Yield each non-empty question until exit or quit. Raises EOFError at the end of the input."""
    while (line := input("> " if interactive else "").strip()).lower() not in ("exit", "quit"):
        if line.lower() == "cls":
            print(CLEAR_SCREEN if interactive else "", end="", flush=True)
        elif question := clean_text(line):
            yield question


def answer(model: T5ForConditionalGeneration, tokenizer: ChatTokenizer, question: str, generation: dict) -> None:
    """Print the answer while it is generated, up to the tokenizer's EOS."""
    ids = tokenizer.encode(question)
    if len(ids) >= MAX_QUESTION_TOKENS:
        print(f"the question has {len(ids)} tokens: only the first {MAX_QUESTION_TOKENS - 1} are read", file=sys.stderr)
    prompt = torch.tensor([[*ids[: MAX_QUESTION_TOKENS - 1], tokenizer.eos_id]], device=model.device)
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id,
        streamer=TextStreamer(WholeCharacters(tokenizer), skip_prompt=True), **generation,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
