"""llama.cpp, through llama-cpp-python, on the questions that our engine answers."""

import torch

from model.generate.engine import Engine, Request

NEW_TOKENS = 24


def open_in_llama_cpp(path, **options):
    """The llama_cpp.Llama of a GGUF file on one thread, with a float32 cache."""
    import llama_cpp

    given = dict(n_ctx=512, n_batch=512, n_threads=1, type_k=0, type_v=0, verbose=False)  # 0: float32
    return llama_cpp.Llama(str(path), **given | options)


def asked_of(engine, talks):
    """Ids that llama.cpp reads for each question, through the chat template in its file."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    shown = Jinja2ChatFormatter(template=engine.metadata["tokenizer.chat_template"], eos_token="", bos_token="")
    prompts = [shown(messages=[dict(role="user", content=text)]).prompt for text in talks]
    return [engine.tokenize(prompt.encode(), add_bos=False, special=True) for prompt in prompts]


def greedy_of(engine, ids):
    """llama.cpp's greedy ids behind these, the one that ends an answer included."""
    found = []
    for token in engine.generate(ids, temp=0.0, repeat_penalty=1.0):
        found.append(token)
        if token == engine.token_eos() or len(found) == NEW_TOKENS:
            return found


def answers_of(chat, inputs):
    """Our greedy ids behind each of `inputs`, the one that ends an answer included."""
    engine = Engine(chat.model, chat.limits(len(inputs), max(map(len, inputs)), NEW_TOKENS))
    places = {engine.add(Request(ids, NEW_TOKENS)): place for place, ids in enumerate(inputs)}
    found = {}
    while not engine.idle:
        found |= {places[new.number]: new.ids for new in engine.step()}
    ids = [found[place] for place in range(len(inputs))]
    return [row if len(row) == NEW_TOKENS else [*row, chat.tokenizer.eos_id] for row in ids]


def first_difference(model, ids, answer, other):
    """By how many nats transformers' model prefers the first token of `answer` that `other` has not; None if equal."""
    places = [place for place, pair in enumerate(zip(answer, other, strict=False)) if len({*pair}) > 1]
    if not places:
        assert answer == other
        return None
    with torch.no_grad():
        scores = model(torch.tensor([[*ids, *answer[: places[0]]]])).logits[0, -1].log_softmax(-1)
    return float(scores[answer[places[0]]] - scores[other[places[0]]])
