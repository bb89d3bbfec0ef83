"""How the examples of a micro-batch are collated."""

import numpy as np
import torch

from model.data.packing import cut
from tests.parts import batch_of, examples_of


def test_collate_shifts_labels_right_within_each_example(store, tokenizer):
    ids = [9, 2, 33, 9]
    micro_batch = batch_of(store, ids, tokenizer.pad_id)
    examples = examples_of(store, ids)
    assert micro_batch.prompt_ids.tolist() == [token for prompt, _ in examples for token in prompt]
    assert micro_batch.labels.tolist() == [token for _, response in examples for token in response]
    shifted = [[tokenizer.pad_id, *response[:-1]] for _, response in examples]
    assert micro_batch.decoder_ids.tolist() == [token for response in shifted for token in response]


def test_no_pad_token_is_computed(store, tokenizer):
    ids = np.arange(len(store))
    for part in cut(ids, store.lengths, 500):
        micro_batch = batch_of(store, part, tokenizer.pad_id)
        sides = (micro_batch.prompt_ids, micro_batch.labels)
        assert sum(map(len, sides)) == store.lengths[part].sum()
        assert all((side != tokenizer.pad_id).all() for side in sides)
        assert (micro_batch.decoder_ids == tokenizer.pad_id).sum() == len(part)
        assert all(side.dtype == torch.int64 for side in sides)
