"""Rank 0 of those that share a teacher: it tells the others what it does with the teacher."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.errors import ModelError
from kd.models.attention.interface import get_documents, uses_packed_attention
from kd.models.distributed.channel import Channel, ReadingOrder
from kd.models.layers import find_trunk
from kd.models.teacher_files import TeacherFiles


class Leader:
    """Gives the orders of this process to the other ranks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._reading = False

    def order_loading(self, teacher: TeacherFiles) -> None:
        """Let the others load their parts of the teacher; the caller loads its own next."""
        self._channel.send(ReadingOrder("load", teacher))

    def lead_reading(self, model: PreTrainedModel) -> None:
        """Let the others read what ``model`` reads from now on."""
        _, trunk = find_trunk(model)
        names = inspect.signature(trunk.forward)

        def begin(_: nn.Module, some: tuple[Any, ...], others: dict[str, Any]) -> None:
            if self._reading:
                self._meet_again()
            documents = get_documents()
            tokens_BL: Tensor = names.bind_partial(*some, **others).arguments["input_ids"]
            rows = (tokens_BL,) if documents is None else (tokens_BL, documents.positions_BL)
            apart = documents is not None and documents.apart
            packed = uses_packed_attention(model)
            self._channel.send(ReadingOrder("read", tensors=rows, packed=packed, apart=apart))
            self._reading = True

        def end(*_: Any) -> None:
            self._reading = False

        # First of all: FSDP2's own hook may wait for the others.
        trunk.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        trunk.register_forward_hook(end)

    def _meet_again(self) -> None:
        """After a pass that was broken off: go on where all ranks did so, and raise where not."""
        try:
            self._channel.meet()
        except RuntimeError as error:
            raise ModelError(
                "A forward pass of the teacher was broken off in one of the processes that share "
                f"it, and not in all: {error}.",
                "If memory ran out, set teacher.batch_size lower. The log says more.",
            ) from error


#: The leader of this process, if others follow it.
_leaders: list[Leader] = []


def find_leader() -> Leader | None:
    """Return the leader of this process; None if no other process follows it."""
    return _leaders[-1] if _leaders else None


@contextmanager
def leading() -> Iterator[None]:
    """Lead the other ranks in this block; they leave at its end.

    Where the block raises they are not told: they may be inside a forward pass, and torchrun ends
    them with this process.
    """
    channel = Channel()
    _leaders.append(Leader(channel))
    try:
        yield
    finally:
        _leaders.pop()
    channel.send(ReadingOrder("end"))
