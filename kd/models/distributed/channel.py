"""The orders that rank 0 gives to the ranks that share a teacher with it.

    rank 0        load a teacher        read rows     read rows    ...    end
    the others          | load                | read        | read           | leave

Rank 0 runs its stage as it would alone. Whenever it loads a shared teacher or begins a forward pass
of one, it tells the others, who do the same with their parts. What they compute, rank 0 has too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from kd.models.teacher_files import TeacherFiles

#: How long a rank waits for an order: rank 0 may tokenise for days. If rank 0 dies, the wait ends.
PATIENCE = timedelta(days=365)
#: How long a rank that broke off a forward pass waits for the others to have done so, too.
GRACE = timedelta(seconds=60)


@dataclass(frozen=True)
class ReadingOrder:
    """What the other ranks shall ``do``: load the ``teacher``, read ``tensors`` with it, or end.

    ``tensors`` are the ids of tokens and, if documents share rows, their positions. ``packed``:
    whether the model uses our attention. ``apart``: whether that keeps the documents apart.
    """

    do: str
    teacher: TeacherFiles | None = None
    tensors: tuple[Tensor, ...] = ()
    packed: bool = False
    apart: bool = False


_TEACHER = TypeAdapter(TeacherFiles | None)


class Channel:
    """Passes orders from rank 0 to the others. All ranks make it together.

    It has a group of its own, in memory, so that an order cannot be taken for a part of a forward
    pass.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, order: ReadingOrder) -> None:
        """Give ``order`` to the other ranks. Only rank 0 calls it."""
        tensors = [each.to("cpu", torch.int64).contiguous() for each in order.tensors]
        shapes = [list(each.shape) for each in tensors]
        teacher = _TEACHER.dump_python(order.teacher, mode="json")
        text = json.dumps(vars(order) | {"teacher": teacher, "tensors": shapes}).encode()
        self._pass_on(torch.tensor([len(text)]))
        self._pass_on(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for each in tensors:
            self._pass_on(each)

    def receive(self) -> ReadingOrder:
        """Wait for the next order."""
        length = int(self._pass_on(torch.zeros(1, dtype=torch.int64)))
        found = json.loads(bytes(self._pass_on(torch.zeros(length, dtype=torch.uint8)).tolist()))
        tensors = [torch.zeros(shape, dtype=torch.int64) for shape in found["tensors"]]
        for each in tensors:
            self._pass_on(each)
        teacher = _TEACHER.validate_python(found["teacher"])
        return ReadingOrder(**found | {"teacher": teacher, "tensors": tuple(tensors)})

    def meet(self) -> None:
        """Wait until every rank has broken off its forward pass; raises where one has not."""
        work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        work.wait(GRACE)

    def _pass_on(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, 0, group=self._group)
        return tensor
