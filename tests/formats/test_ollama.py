"""A Modelfile's template writes the prompts of the chat template, in Go and in Ollama, which then answers as we do."""

import json
import math
import re
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.data.default_template import default_template
from model.data.template_frames import TemplateFrames
from model.data.tokenizer import load_tokenizer
from model.data.turn_template import turn_template, write_turn_template
from model.formats.conversions import to_gguf
from model.formats.ollama import modelfile
from model.formats.weights import add_values
from model.serve.answering import load_chat_model, prompt_ids
from tests.data.chat_templates import LLAMA_MARKS, MARKS, TEMPLATES
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.formats.test_gguf import NEAR_TIE, TALKS, write_decoder
from tests.llama import answers_of
from tests.nn.decoder.test_network import VARIANTS
from tests.ollama import gap_of, ollama_at

needs_go = pytest.mark.skipif(not shutil.which("go"), reason="go is not installed")
needs_ollama = pytest.mark.skipif(not shutil.which("ollama"), reason="Ollama is not installed")
KNOWN = {**TEMPLATES, "own": None}  # own: what write_turn_template gives
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
QUESTION = dict(role="user", content="Is {{ .X }} < \"2\" & 'é'?\n你好\t```a\\n```")
ANSWER, SYSTEM = (
    dict(role="assistant", content="不 <b>是</b>\n\n- $1"),
    dict(role="system", content="简短地\n回答 %s {{ end }}"),
)
THOUGHT = ANSWER | dict(reasoning_content="想\n一想")
ASKED = [
    *((talk, None) for talk in ([QUESTION], [SYSTEM, QUESTION], [QUESTION, ANSWER, QUESTION])),
    ([SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER, QUESTION], None),
]
DECODERS = ("own", "qwen3"), ("qwen3", "qwen3"), ("qwen1_5", "qwen2"), ("llama3", "llama 3")  # template, network
WITH_SWITCH = [*ASKED, ([QUESTION], True), ([QUESTION], False), ([SYSTEM, QUESTION, THOUGHT, QUESTION], None)]
GO = """package main
import ("encoding/json"; "os"; "strings"; "text/template")
type Asked struct { Template string; Think, IsThinkSet bool; Messages []struct { Role, Content, Thinking string } }
func main() {
    var asked []Asked
    if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil { panic(err) }
    shown := []string{}
    for _, one := range asked {
        var text strings.Builder
        if err := template.Must(template.New("").Parse(one.Template)).Execute(&text, one); err != nil { panic(err) }
        shown = append(shown, text.String())
    }
    json.NewEncoder(os.Stdout).Encode(shown)
}
"""


def asked_of(name):
    return WITH_SWITCH if name == "qwen3" else ASKED


def tokenizer_with(directory, name):
    """A tokenizer with the chat template of this name."""
    llama = dict(special=LLAMA_MARKS, end="<|eot_id|>") if name == "llama3" else {}
    made = make_qwen_tokenizer(directory, template=KNOWN[name], marks=MARKS, **llama)
    write_turn_template(made, directory)
    return load_tokenizer(directory)


def prompts_of(tokenizer, asked):
    """What the chat template itself makes of (messages, thinking) pairs."""
    requests = [dict(messages=talk, tools=None, prompt=True, thinking=thinking) for talk, thinking in asked]
    return [one["text"] for one in turn_template(tokenizer).frames.render(requests)]


def as_go(text, talk, thinking):
    """What Ollama's template is given of a conversation, by a Modelfile's text."""
    template, system = (
        re.search(f'^{word} """(.*?)"""$', text, re.DOTALL | re.MULTILINE) for word in ("TEMPLATE", "SYSTEM")
    )
    own = [dict(role="system", content=system[1])] if system and talk[0]["role"] != "system" else []
    messages = [dict(one, thinking=one.get("reasoning_content", "")) for one in (*own, *talk)]
    return dict(Template=template[1], Think=bool(thinking), IsThinkSet=thinking is not None, Messages=messages)


@needs_go
def test_go_makes_of_each_template_known_here_the_prompts_of_the_chat_template(tmp_path):
    wanted, asked = [], []
    for name in KNOWN:
        tokenizer = tokenizer_with(tmp_path / name, name)
        text = modelfile("m.gguf", turn_template(tokenizer).frames, {}, [])
        wanted += prompts_of(tokenizer, asked_of(name))
        asked += [as_go(text, talk, thinking) for talk, thinking in asked_of(name)]
    (tmp_path / "say.go").write_text(GO)
    given = dict(input=json.dumps(asked), capture_output=True, text=True, check=True)
    assert json.loads(subprocess.run(["go", "run", "say.go"], cwd=tmp_path, **given).stdout) == wanted


def test_the_modelfile_says_the_settings_and_the_system_s_text_or_passes_prompts_on(tmp_path):
    tokenizer = make_qwen_tokenizer(tmp_path, marks=MARKS)

    def text_of(template, ends=(), **settings):
        frames = TemplateFrames(tokenizer, template or default_template(tokenizer))
        return modelfile("m.gguf", frames, settings, ends)

    plain = text_of(TEMPLATES["qwen1_5"], ["<|im_end|>", "好"])
    chatml = "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
    assert plain.startswith(f'FROM ./m.gguf\nTEMPLATE """{chatml}"""\nSYSTEM """You are a helpful assistant"""\n')
    assert plain.endswith(
        'temperature 0\nPARAMETER repeat_penalty 1.0\nPARAMETER stop "<|im_end|>"\nPARAMETER stop "好"\n'
    )
    drawn = text_of(None, do_sample=True, top_p=0.9, top_k=20.0, repetition_penalty=1.1, max_new_tokens=64)
    values = ("temperature 1.0", "top_k 20", "top_p 0.9", "repeat_penalty 1.1", "num_predict 64")
    assert "SYSTEM" not in drawn and drawn.endswith("".join(f"PARAMETER {value}\n" for value in values))
    strange = dict(temperature=math.nan, top_k=math.inf, top_p=-1, repetition_penalty=10**400, max_new_tokens="x")
    assert "temperature 1.0\nPARAMETER top_k 50\nPARAMETER top_p 1.0\nPARAMETER repeat_penalty 1.0\n" in text_of(
        None, do_sample=True, **strange
    )
    assert '<|im_start|>assistant\n<think>\n\n</think>\n\n"""\nSYSTEM' in text_of(TEMPLATES["minimind"])
    braces = TEMPLATES["qwen1_5"].replace("You are", "{{ .X }}")
    for other in (OTHER, braces):
        assert 'TEMPLATE """{{ .Prompt }}"""' in text_of(other)


@pytest.fixture(scope="module")
def ollama(tmp_path_factory):
    with ollama_at(tmp_path_factory.mktemp("ollama")) as found:
        yield found


def create(ollama, directory):
    """Have Ollama make a model, with the directory's name, of what the export of a model writes."""
    target = directory.with_name(f"{directory.name}-gguf")
    to_gguf(directory, target, "f32")
    ollama.run("create", directory.name, "-f", "Modelfile", folder=target)


@needs_ollama
@pytest.mark.parametrize("name", KNOWN)
def test_ollama_asks_with_the_prompts_of_the_chat_template(tmp_path, ollama, name):
    tokenizer = tokenizer_with(tmp_path / "tokenizer", name)
    write_decoder(tmp_path / name, tokenizer, max_position_embeddings=512)
    create(ollama, tmp_path / name)
    before, counts = len(ollama.prompts()), []
    for talk, thinking in asked_of(name):
        messages = [dict(one, thinking=one.get("reasoning_content", "")) for one in talk]
        switch = {} if thinking is None else dict(think=thinking)
        answer = ollama.ask("chat", model=name, messages=messages, options=dict(num_predict=1), **switch)
        counts.append(answer["prompt_eval_count"])
    system, question = SYSTEM["content"], QUESTION["content"]
    ollama.ask("generate", model=name, prompt=question, system=system, options=dict(num_predict=1))
    wanted = prompts_of(tokenizer, asked_of(name))
    assert ollama.prompts()[before:] == [*wanted, wanted[1]]
    assert counts == [len(tokenizer.parse(text)) for text in wanted]


def write_answering(directory, tokenizer, **changes):
    """A decoder whose answers are texts of ASCII: Ollama leaves out parts of characters."""
    own = dict(max_position_embeddings=512, tie_word_embeddings=False)  # the output's rows alone are changed
    write_decoder(directory, tokenizer, **changes | own)
    tensors = load_file(directory / "model.safetensors")
    for number, row in enumerate(tensors["lm_head.weight"]):
        token = tokenizer.backend.id_to_token(number) or ""
        if number != tokenizer.eos_id and not re.fullmatch("[!-~]+", token) or token == "<|endoftext|>":
            row.zero_()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    add_values(directory / "generation_config.json", dict(max_new_tokens=24))


@needs_ollama
@pytest.mark.parametrize("name, variant", DECODERS)
def test_ollama_s_greedy_answers_are_ours_but_for_near_ties_of_its_cache_in_float16(tmp_path, ollama, name, variant):
    tokenizer = tokenizer_with(tmp_path / "tokenizer", name)
    home = tmp_path / f"answers-{name}"
    write_answering(home, tokenizer, **VARIANTS[variant])
    create(ollama, home)
    chat, theirs = load_chat_model(home, "cpu"), AutoModelForCausalLM.from_pretrained(home).eval()
    inputs = [prompt_ids(chat, [("user", text)], 128) for text in TALKS]
    answers = answers_of(chat, inputs)
    asked = [dict(messages=[dict(role="user", content=text)], options=dict(num_thread=1)) for text in TALKS]
    switch = (
        dict(think=False) if name == "qwen3" else {}
    )  # we ask for no thought, where Ollama leaves it to the template
    found = [ollama.ask("chat", model=home.name, **one, **switch) for one in asked]
    texts = [one["message"]["content"] for one in found]
    rows = list(zip(inputs, answers, texts, strict=True))
    gaps = [gap_of(theirs, chat.tokenizer, *row) for row in rows]
    print(name, sum(gap == 0 for gap in gaps), "of", len(gaps), "equal; largest gap", max(gaps))
    assert len({*texts}) > 50 and [one["prompt_eval_count"] for one in found] == [*map(len, inputs)]
    assert sum(gap == 0 for gap in gaps) >= 58 and all(0 <= gap <= NEAR_TIE for gap in gaps)
    words = ["--think=false"] if switch else []
    assert ollama.run("run", home.name, *words, typed=TALKS[0]).strip() == texts[0].strip()
    assert "num_predict                    24" in ollama.ask("show", model=home.name)["parameters"]
