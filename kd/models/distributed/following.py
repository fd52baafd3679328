"""A rank that shares a teacher with rank 0: it does with its part what rank 0 does with its own."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kd.errors import OutOfMemory, format_first_line, is_out_of_memory
from kd.models.attention.interface import use_own_attention, use_packed_attention
from kd.models.distributed.channel import Channel, ReadingOrder
from kd.models.layers import compute_hidden_states
from kd.models.loading import load_part
from kd.models.precision import float32_products, pick_device
from kd.text.packed_rows import PackedRows


@torch.no_grad()
def follow() -> None:
    """Carry out the orders of rank 0 until it ends."""
    channel = Channel()
    model: PreTrainedModel | None = None
    with float32_products():
        while (order := channel.receive()).do != "end":
            if order.teacher is not None:
                model = None  # two parts need not fit into memory
                model = load_part(order.teacher, pick_device(), leads=False)
            else:
                assert model is not None, "rank 0 reads what it has loaded"
                _read(model, order, channel)


def _read(model: PreTrainedModel, order: ReadingOrder, channel: Channel) -> None:
    """Run the forward pass that rank 0 runs.

    An error that it meets too, such as one of an attention that is only tried, is no reason to end:
    ``Channel.meet`` shows whether all ranks had it.
    """
    try:
        switch = use_packed_attention if order.packed else use_own_attention
        switch(model)
        tokens_BL, *positions = (each.to(pick_device()) for each in order.tensors)
        documents = PackedRows.of(positions[0], order.apart) if positions else None
        compute_hidden_states(model, tokens_BL, documents)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"Memory ran out in a process that shares the teacher: {format_first_line(error)}.",
                "Set teacher.batch_size or data.sequence_length lower, or resources.gpus higher.",
            ) from error
        channel.meet()
    except Exception:
        channel.meet()
