"""Greedy generation: ids to the ids that follow them, all sequences together."""

import torch

from model.runtime.watchdog import stop_asked

STEPS_BETWEEN_CHECKS = 8  # reading on the host whether all are done waits for the device


@torch.inference_mode()
def generate(model, inputs, first_id, eos_id, max_new_tokens):
    """For each of `inputs` (arrays of ids), a list of the ids that follow it, without the EOS that ends it.

    Generates at most `max_new_tokens` tokens each, fewer once a stop is requested. `first_id` is the token that a
    sequence of targets begins with.
    """
    was_training = model.training
    model.eval()
    try:
        cache = model.new_cache(len(inputs), max(map(len, inputs)), max_new_tokens)
        ids = torch.tensor(model.prefill(inputs, cache, list(range(len(inputs))), first_id), device=model.device)
        done, steps = torch.zeros_like(ids, dtype=torch.bool), []
        for step in range(max_new_tokens):
            ids = model.decode_one(ids, cache).argmax(dim=1)
            steps.append(ids)
            done |= ids == eos_id
            if step % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1 and (stop_asked() or done.all()):
                break
    finally:
        model.train(was_training)
    rows = torch.stack(steps, dim=1).tolist() if steps else [[] for _ in inputs]
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]
