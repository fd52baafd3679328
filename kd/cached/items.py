"""A batch to its sequences, and sequences to a batch.

Shapes: B sequences, L positions of a sequence, N positions with a target, E entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.records import Records
from kd.cached.decoding import IGNORED, Item

#: Keys whose second axis is as wide as the widest position of the sequence.
_PADDED = ("teacher_ids", "teacher_weights")
_OFFSETS = "teacher_offsets"
_FLAT = (*_PADDED, _OFFSETS)


def split_batch(batch: Mapping[str, Any]) -> list[Item]:
    """Return the sequences of a batch, each without the axis B; ``collate`` is the inverse.

    Padding is cut to the width of each sequence.
    """
    if "records" in batch:
        return _split_records(batch)
    if _OFFSETS in batch:
        return _split_ragged(batch)
    items = _split_rows(batch)
    for item in items if "teacher_weights" in batch else []:
        # The entries of a position come first, and those that count weigh more than 0 or less.
        used_E = (item["teacher_weights"] != 0).any(0).nonzero()
        width = int(used_E[-1]) + 1 if len(used_E) else 1
        item.update({name: item[name][:, :width].contiguous() for name in _PADDED})
    return items


def collate(items: Sequence[Mapping[str, Any]]) -> Item:
    """Join sequences to a batch, padded to the widest position; it is the ``collate_fn``.

    Ids and weights are padded with 0. Rows of a ragged form or of records follow one another.
    """
    if "records" in items[0]:
        rows = [{k: v for k, v in item.items() if k != "records"} for item in items]
        names = items[0]["records"]
        # torch has no sums of all unsigned types, but numpy joins them.
        arrays = {name: [item["records"][name].numpy() for item in items] for name in names}
        joined = {name: torch.from_numpy(np.concatenate(each)) for name, each in arrays.items()}
        return _stack(rows) | {"records": joined}
    if _OFFSETS in items[0]:
        rows = [{k: v for k, v in item.items() if k not in _FLAT} for item in items]
        joined = {name: torch.cat([item[name] for item in items]) for name in _PADDED}
        counts = torch.cat([item[_OFFSETS].diff() for item in items])
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return _stack(rows) | joined | {_OFFSETS: offsets}
    return _stack(items)


def _stack(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _stack_padded([item[name] for item in items]) for name in items[0]}


def _stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose last axes may differ, padded with 0."""
    if len({each.shape for each in tensors}) == 1:
        return torch.stack(list(tensors))
    width = max(each.shape[-1] for each in tensors)
    out = tensors[0].new_zeros(len(tensors), *tensors[0].shape[:-1], width)
    for row, each in zip(out, tensors, strict=True):
        row[..., : each.shape[-1]] = each
    return out


def _split_rows(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    rows = zip(*(tensor.unbind(0) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, row, strict=True)) for row in rows]


def _split_records(batch: Mapping[str, Any]) -> list[Item]:
    items: list[Item] = _split_rows({k: v for k, v in batch.items() if k != "records"})
    records = Records({name: column.numpy() for name, column in batch["records"].items()})
    ends_B = (batch["labels"] != IGNORED).sum(1).cumsum(0).tolist()
    for item, start, end in zip(items, [0, *ends_B], ends_B, strict=False):
        columns = records.slice(start, end).columns
        item["records"] = {name: torch.from_numpy(column) for name, column in columns.items()}
    return items


def _split_ragged(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    items = _split_rows({k: v for k, v in batch.items() if k not in _FLAT})
    offsets_BL1 = batch[_OFFSETS]
    length = batch["input_ids"].shape[1]
    for number, item in enumerate(items):
        own = offsets_BL1[number * length : (number + 1) * length + 1]
        entries = slice(int(own[0]), int(own[-1]))
        item.update({name: batch[name][entries] for name in _PADDED})
        item[_OFFSETS] = own - own[0]
    return items
