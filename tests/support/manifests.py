"""Manifests with one field changed or deleted."""

import json
from functools import reduce
from operator import getitem

from cache.manifest import encode_canonical_json


def leaves(value, path=()):
    """Yield the path of each value of a JSON document, containers included.

    A path is a tuple of names and list indices.
    """
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def other(value):
    """Return a different value of the same kind (a number in the place of null)."""
    by_kind = {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v * 2 + 1,
        str: lambda v: v + "x",
    }
    by_kind |= {
        type(None): lambda v: 0.0,
        list: lambda v: [*v, *v[:1]] or [1],
        dict: lambda v: {**v, "new": 1},
    }
    return by_kind[type(value)](value)


def edits(data: bytes):
    """Yield copies of the document with one field changed, and with it deleted, for each field.

    Each copy comes as a description of the edit and the bytes.
    """
    for path in leaves(json.loads(data)):
        for change in ("changed", "gone"):
            document = json.loads(data)
            *parents, last = path
            inner = reduce(getitem, parents, document)
            if change == "changed":
                inner[last] = other(inner[last])
            else:
                del inner[last]
            yield f"{'.'.join(map(str, path))} {change}", encode_canonical_json(document)
