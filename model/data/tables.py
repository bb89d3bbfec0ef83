"""The rows inside one object: a table written by columns, or lists of rows in rows."""

from collections.abc import Iterable, Iterator

from model.data.columns import Columns

ROW_LISTS = ("data", "rows", "paragraphs", "qas", "examples", "instances")


def rows_inside(value: dict, layout: Columns) -> Iterable | None:
    """The rows that an object holds; None if it holds none.

    Known are a table of columns (lists of equal length; pandas' objects of equal keys), pandas' "split" and "index",
    and lists of rows in a column of ROW_LISTS, of which each row keeps the `context` beside its list.
    """
    if layout.prompts and layout.response or layout.messages and by_columns(value) is not None:
        return by_columns(value)
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return (
            dict(zip(value["columns"], row, strict=False)) if isinstance(row, list) else row for row in value["data"]
        )
    if isinstance(value.get("row"), dict):
        return (value["row"],)
    for name in ROW_LISTS:
        if isinstance(value.get(name), list) and value[name]:
            return _with_context(value[name], value.get("context"))
    columns = list(value.values())
    if columns and all(isinstance(each, dict) and each for each in columns) and all(key.isdecimal() for key in value):
        return columns
    return None


def by_columns(value: dict) -> Iterator[dict] | None:
    """The rows of columns of equal length, at least two of them; None for another form."""
    columns = list(value.values())
    if len(columns) > 1 and all(isinstance(each, list) and len(each) > 1 for each in columns):
        if len(set(map(len, columns))) == 1 and not any(_holds_turns(each) for each in columns):
            return (dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True))
    elif len(columns) > 1 and all(isinstance(each, dict) and each for each in columns):
        if all(each.keys() == columns[0].keys() for each in columns) and all(map(str.isdecimal, columns[0])):
            return ({name: each[key] for name, each in value.items()} for key in columns[0])
    return None


def _holds_turns(column):
    return any(isinstance(each, dict) and ("role" in each or "from" in each) for each in column)


def _with_context(rows, context):
    if not isinstance(context, str):
        return rows
    return ({"context": context, **row} if isinstance(row, dict) else row for row in rows)
