"""Finds texts that are nearly equal: MinHash signatures (Broder 1997) of pieces of 5 characters, compared in bands.

Two texts are near duplicates if they share at least SIMILARITY of their pieces (Jaccard). It is estimated from SLOTS
numbers a text, with a standard deviation of 0.035 at 0.8; of the texts that share 0.8 about 95 % are compared, of those
that share 0.9 all. Host memory: 2 * SLOTS bytes a text, twice that while they are compared.
"""

from collections.abc import Iterable

import numpy as np

SHINGLE_CHARS, SIMILARITY, SEED = 5, 0.8, 1
SLOTS, BANDS = 128, 16
BLOCK_ROWS = 1 << 16  # signatures compared at a time
MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93,
                        0xA24BAED4963EE407], np.uint64)  # fmt: skip


class Signatures:
    """The signatures of texts that are added in batches. Raises RuntimeError if rensa is not installed."""

    def __init__(self):
        try:
            from rensa import RMinHash
        except ImportError:
            raise RuntimeError("near duplicates need rensa: pip install -e '.[dedup]'") from None
        self._digest = RMinHash.digest_matrix_from_flat_token_hashes
        self._parts = []

    def add(self, texts: Iterable[str]) -> None:
        hashes, ends = [], [0]
        for text in texts:
            hashes.append(_shingle_hashes(text))
            ends.append(ends[-1] + len(hashes[-1]))
        if hashes:
            matrix = self._digest(np.concatenate(hashes), np.array(ends, np.uint64), SLOTS, SEED)
            # 16 of 32 bits: one false match in 65,536 (Li and König 2010), half the memory
            self._parts.append(np.array(matrix.to_rows(), np.uint32).astype(np.uint16))

    def near_duplicates(self) -> tuple[np.ndarray, np.ndarray]:
        """(bool (texts,): whether a text is nearly equal to an earlier one, int (texts,): the number of that one)."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros((0, SLOTS), np.uint16)
        self._parts = [rows]
        found, partner = np.zeros(len(rows), bool), np.arange(len(rows))
        for band in np.split(np.arange(SLOTS), BANDS):
            keys = _band_keys(rows, band)
            order = np.argsort(keys, kind="stable")  # equal keys stand together, the earliest text first
            is_first = np.r_[True, keys[order][1:] != keys[order][:-1]] if len(order) else np.zeros(0, bool)
            earliest = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
            later = ~is_first & ~found[order]
            _mark(rows, order[later], earliest[later], found, partner)
        return found, partner


def _mark(rows, later, earlier, found, partner):
    """Set `found` and `partner` of the texts `later` whose signatures agree enough with those of `earlier`."""
    for start in range(0, len(later), BLOCK_ROWS):
        ours, theirs = later[start : start + BLOCK_ROWS], earlier[start : start + BLOCK_ROWS]
        is_near = (rows[ours] == rows[theirs]).mean(axis=1) >= SIMILARITY
        found[ours[is_near]] = True
        partner[ours[is_near]] = theirs[is_near]


def _band_keys(rows, band):
    """uint64 (texts,): a hash of the slots of one band."""
    keys = np.zeros(len(rows), np.uint64)
    for slot in band:
        keys = (keys ^ rows[:, slot]) * MULTIPLIERS[0]
        keys ^= keys >> np.uint64(29)
    return keys


def _shingle_hashes(text):
    """uint64 hashes of the pieces of SHINGLE_CHARS characters; of the whole text if it is shorter."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32).astype(np.uint64)
    codes = np.pad(codes, (0, max(0, SHINGLE_CHARS - len(codes))))
    count = len(codes) - SHINGLE_CHARS + 1
    sums = sum(codes[place : place + count] * MULTIPLIERS[place] for place in range(SHINGLE_CHARS))
    return sums ^ (sums >> np.uint64(31))
