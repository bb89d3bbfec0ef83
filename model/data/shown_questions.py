"""What people see of the questions that a network was asked: their texts, without what a template writes."""

from itertools import groupby

from model.data.tokenizer import ROLE_MARKS, ChatTokenizer

ROLES = "system", "user", "assistant", "tool", "model", "ipython"  # as templates name them behind a control token


def shown_questions(tokenizer: ChatTokenizer, rows) -> list[str]:
    """The texts of each of `rows`, arrays of ids: a line for each turn, without control tokens and names of roles."""
    control, pieces, places = tokenizer.control_ids(), [], []
    whole = {tokenizer.backend.token_to_id(mark) for mark in ROLE_MARKS}  # they name a role themselves
    for place, ids in enumerate(rows):
        names_role = False
        for is_control, piece in groupby(map(int, ids), control.__contains__):
            piece = list(piece)
            if not is_control:
                pieces.append(piece)
                places.append((place, names_role))
            names_role = is_control and piece[-1] not in whole
    lines = [[] for _ in rows]
    for (place, names_role), text in zip(places, tokenizer.decode_batch(pieces), strict=True):
        first, _, rest = text.partition("\n")
        said = (rest if names_role and first in ROLES else text).strip()
        lines[place] += [said] if said else []
    return ["\n".join(turns) for turns in lines]
