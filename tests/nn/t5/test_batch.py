"""How the examples of a micro-batch are collated."""

import numpy as np
import pytest
import torch

from model.data.buckets import Bucket
from model.data.packing import cut
from model.data.sequences import Sequences
from model.nn.base import Packing
from model.nn.t5.batch import collate
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


@pytest.mark.parametrize("bucket", [None, Bucket((128, 192), 2)])
def test_the_kernels_tiles_of_two_targets_read_one_source_and_each_sees_itself_alone(bucket):
    lengths, targets = np.array([[70, 75], [3, 5]]), np.array([[66, 9], [1, 4]])
    columns = np.arange(73) % 50 + 3, np.arange(80) % 50 + 3
    sequences = Sequences(columns, lengths, ids=np.arange(4), target_lengths=targets)
    batch = collate(sequences, Packing(0, True, bucket, 4, dropout=True))

    def used(tiles):
        return [row[1:] for row in tiles.tolist() if row[0] == 0 and row[2] and row[4]]  # padding lacks one side

    assert used(batch.encoder_layout.query_tiles) == [[0, 70, 0, 70], [70, 3, 70, 3]]
    own = [[0, 66], [66, 9], [75, 1], [76, 4]]
    assert used(batch.decoder_layout.query_tiles) == [[*part, *part] for part in own]
    assert used(batch.cross_layout.query_tiles) == [[0, 75, 0, 70], [75, 5, 70, 3]]
    assert used(batch.cross_layout.key_tiles) == [[0, 75, 0, 70], [75, 5, 70, 3]]
    assert [batch.decoder_ids[start].item() for start, _ in own] == [0] * 4
    assert batch.decoder_token_keys[:80, 1].tolist() == np.repeat(np.arange(4), targets.ravel()).tolist()
    assert batch.prompt_token_keys[:73, 1].tolist() == [0] * 70 + [2] * 3
