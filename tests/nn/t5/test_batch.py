"""How the examples of a micro-batch are collated."""

import numpy as np
import pytest
import torch

from model.data.buckets import Bucket
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


def test_only_with_dropout_the_tokens_have_keys_and_they_tell_where_each_came_from(store, tokenizer):
    ids = [9, 2, 33]
    assert batch_of(store, ids, tokenizer.pad_id).prompt_token_keys is None
    micro_batch = batch_of(store, ids, tokenizer.pad_id, dropout=True)
    for column, keys in enumerate((micro_batch.prompt_token_keys, micro_batch.decoder_token_keys)):
        expected = [[2 * place + column, i, 0] for i in ids for place in range(store.lengths[i, column])]
        assert keys.dtype == torch.int32
        assert keys.tolist() == expected


@pytest.mark.parametrize("bucket", [None, Bucket((256, 320), 4)])
def test_the_keys_lie_in_the_flat_tensor_of_the_kernels_and_padding_moves_none(store, tokenizer, bucket):
    pytest.importorskip("triton")
    ids = [9, 2, 33]
    plain = batch_of(store, ids, tokenizer.pad_id, dropout=True)
    packed = batch_of(store, ids, tokenizer.pad_id, bucket, kernels=True, dropout=True)
    without = batch_of(store, ids, tokenizer.pad_id, bucket, kernels=True)
    assert without.prompt_token_keys is None
    flat = packed.flat.data
    assert torch.equal(flat[: len(without.flat.data)], without.flat.data)
    for name, tokens in (("prompt_token_keys", "prompt_ids"), ("decoder_token_keys", "decoder_ids")):
        keys, expected = getattr(packed, name), getattr(plain, name)
        assert torch.equal(keys[: len(expected)], expected)
        assert len(keys) == len(getattr(packed, tokens))
        assert keys.data_ptr() % 16 == flat.data_ptr() % 16
        assert keys.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_no_pad_token_is_computed(store, tokenizer):
    ids = np.arange(len(store))
    for part in cut(ids, store.lengths, 500):
        micro_batch = batch_of(store, part, tokenizer.pad_id)
        columns = (micro_batch.prompt_ids, micro_batch.labels)
        assert sum(map(len, columns)) == store.lengths[part].sum()
        assert all((column != tokenizer.pad_id).all() for column in columns)
        assert (micro_batch.decoder_ids == tokenizer.pad_id).sum() == len(part)
        assert all(column.dtype == torch.int64 for column in columns)
