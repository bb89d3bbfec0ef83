"""Hashes of the pairs in a token store, and the pairs that two stores share."""

import pytest

from model.data import row_hashes, store_writer
from model.data.row_hashes import shared_rows
from tests.parts import make_pairs, open_pairs, write_parquet


def test_the_hash_of_all_ids_depends_on_the_pairs_and_their_order_only(tmp_path, tokenizer, monkeypatch):
    pairs, hashes = make_pairs(30, seed=7), []
    (one, other), other_split = pairs[0], ("1", "23")  # the same ids, divided differently
    orders = (pairs, pairs, pairs[::-1], [(other, one), *pairs[1:]], [other_split], [("12", "3")])
    for number, rows in enumerate(orders):
        monkeypatch.setattr(store_writer, "ROWS_PER_BATCH", 4096 if number == 0 else 7)
        path = write_parquet(tmp_path / f"{number}.parquet", rows)
        hashes.append(open_pairs(path, tokenizer, 64, tmp_path / "tokens").meta["ids_sha256"])
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == len(hashes) - 1


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 1 << 20])
def test_validation_pairs_and_prompts_that_are_also_in_the_training_file_are_counted(
    tmp_path, tokenizer, monkeypatch, rows_per_chunk
):
    monkeypatch.setattr(row_hashes, "ROWS_PER_CHUNK", rows_per_chunk)
    train, fresh = make_pairs(20, seed=1), make_pairs(5, seed=2)
    shared = [(train[3][0], fresh[0][1]), (train[9][0], fresh[1][1])]
    swapped = [tuple(reversed(train[7]))]
    stores = [
        open_pairs(write_parquet(tmp_path / f"{name}.parquet", pairs), tokenizer, 64, tmp_path / "tokens")
        for name, pairs in (("train", train), ("valid", [*train[:4], *fresh, *shared, *swapped]), ("fresh", fresh))
    ]
    assert shared_rows(stores[1], stores[0]) == (4, 2)
    assert shared_rows(stores[2], stores[0]) == (0, 0)
