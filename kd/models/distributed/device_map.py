"""A teacher whose layers lie one after the other on the GPUs, in the host's memory and on the disk.

accelerate chooses their places, and brings what a layer needs to the device that computes it. One
process runs the whole model.

Shapes: D hidden width, V rows of the LM head.
"""

from __future__ import annotations

import shutil
import weakref
from dataclasses import dataclass
from tempfile import mkdtemp

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.models.distributed.whole_head import move_hidden_states, put_head_whole


@dataclass(frozen=True)
class Places:
    """Where the layers of a teacher may lie: the most bytes on each device, by accelerate's names.

    ``folder`` gets the weights on the disk whose form is not that of the model's files, such as
    those of experts. It is a temporary one, and is deleted with these places.
    """

    most_bytes: dict[int | str, int]
    folder: str

    @classmethod
    def of(cls, gpu_memory: int | None = None, host_memory: int | None = None) -> Places:
        """Return the places with at most so many bytes on each GPU, and in the host's memory.

        None means all that is free.
        """
        # accelerate takes a second to import, and only such teachers need it here.
        from accelerate.utils import get_max_memory

        most_bytes: dict[int | str, int] = get_max_memory()
        for name in most_bytes:
            wanted = host_memory if name == "cpu" else gpu_memory
            most_bytes[name] = most_bytes[name] if wanted is None else wanted
        folder = mkdtemp(prefix="potstill-offload-")
        places = cls(most_bytes, folder)
        weakref.finalize(places, shutil.rmtree, folder, ignore_errors=True)
        return places

    def list_arguments(self) -> dict[str, str | dict[int | str, int]]:
        """The arguments of transformers' ``from_pretrained``."""
        return {"device_map": "auto", "max_memory": self.most_bytes, "offload_folder": self.folder}

    def settle(self, model: PreTrainedModel, device: torch.device) -> None:
        """Let ``model`` give its hidden states on ``device``, and have its LM head there.

        It keeps these places.
        """
        put_head_whole(model, *_read_head(model), device)
        move_hidden_states(model, device)
        object.__setattr__(model, "places", self)


@torch.no_grad()
def _read_head(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return weight (V, D) and bias (V,) of the LM head, wherever they lie."""
    head = model.get_output_embeddings()
    if head.weight.device.type != "meta":
        return head.weight.detach(), None if head.bias is None else head.bias.detach()
    from accelerate.utils import align_module_device

    # Only inside this block does the module hold weights that lie in the host or on the disk.
    with align_module_device(head):
        return head.weight.detach().clone(), None if head.bias is None else head.bias.clone()
