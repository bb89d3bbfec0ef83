"""Mutations of bytes and of JSON values. `draw` is a random.Random."""

import copy

FRAGMENTS = [
    b'"', b"'", b",", b"\t", b"\n", b"\r\n", b"\\", b"{", b"}", b"[", b"]", b":", b"null", b"NaN", b"1e999", b"-1",
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\\ud83d", b"9" * 40, b"[" * 3000, b"../",
    "的".encode(), "，".encode("gb18030"),
]  # fmt: skip
ODD_VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "的", "x" * 3000, [], {},
    [[]], {"a": {}}, "../../etc/passwd", "/etc/passwd", "[EOS]", "\ud83d",
]  # fmt: skip


def mutate(draw, data):
    """A copy of `data` (bytes) with a few places changed, deleted, repeated or truncated."""
    data = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 8, 100))
        change = draw.randrange(6)
        if change == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif change == 1:
            del data[at : at + size]
        elif change == 2:
            data[at:at] = draw.choice(FRAGMENTS)
        elif change == 3:
            data[at:at] = data[max(at - size, 0) : at]
        elif change == 4:
            data[at : at + size] = draw.randbytes(size)
        elif draw.random() < 0.3:
            del data[at:]
    return bytes(data)


def mutate_tree(draw, tree):
    """A copy of a JSON value with a few of its nodes replaced, deleted or repeated."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2))):
        node = tree
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw.choice(keys[:8] + keys[-8:])
            if draw.random() < 0.4 or not isinstance(node[key], dict | list):
                _replace(draw, node, key)
                break
            node = node[key]
    return tree


def _replace(draw, node, key):
    change = draw.randrange(4)
    if change == 0:
        del node[key]
    elif change == 1 and isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    elif change == 2 and isinstance(node, dict):
        node[draw.choice(("type", "model", "auto_map", "的", "vocab_size"))] = node[key]
    else:
        node[key] = draw.choice(ODD_VALUES)
