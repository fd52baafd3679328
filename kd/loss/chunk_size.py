"""How many positions have their logits in memory at a time.

On a GPU the size follows the memory that is free. Every chunk reads and writes the gradient of the
LM head's weight once more (``count_head_gradient_bytes``), so large chunks move
fewer bytes. Their number also decides the order in which the terms of that gradient are added, and
so its last bits. Therefore the size is a power of two: it stays the same while the free memory
changes by less than half, as between two steps or two runs of a job. ``train.logits_chunk`` fixes
it. On a CPU, whose caches decide, it depends only on the vocabulary. Imports torch only to ask a
GPU, because plans are made without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.codec import Codec

if TYPE_CHECKING:
    import torch

#: Logits of a chunk on a CPU, 48 MiB in float32. With half as many, products take a tenth longer.
CPU_ELEMENTS = 12 * 2**20
#: Most positions of a chunk on a CPU. More rows make products no faster, and leave the caches.
CPU_POSITIONS = 1024
#: Most logits of a chunk on a GPU, 2 GiB in bfloat16.
GPU_ELEMENTS = 2**30
#: Share of the free GPU memory that a chunk may take.
GPU_SHARE = 1 / 8
#: Bytes of a number of the gradient of the LM head's weight.
_GRADIENT_BYTES = 4
#: Bytes of a logit and its copies where plain operations process the chunk.
PLAIN_LOGIT_BYTES = 16


def choose_chunk_positions(
    vocabulary: int, device: torch.device, logit_bytes: int = PLAIN_LOGIT_BYTES
) -> int:
    """Return how many positions have their logits in memory at a time.

    ``logit_bytes`` is the memory of a logit while its chunk is processed. On a GPU the size follows
    the memory that is free now.
    """
    if device.type != "cuda":
        return choose_cpu_chunk_positions(vocabulary)
    import torch

    free = torch.cuda.mem_get_info(device)[0]
    # Memory that torch holds but does not use is free for us, and the driver counts it as taken.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return choose_gpu_chunk_positions(vocabulary, free, logit_bytes)


def choose_cpu_chunk_positions(vocabulary: int) -> int:
    """Return how many positions have their logits in memory at a time, on a CPU."""
    return max(min(CPU_ELEMENTS // vocabulary, CPU_POSITIONS), 1)


def choose_gpu_chunk_positions(
    vocabulary: int, free: int, logit_bytes: int = PLAIN_LOGIT_BYTES
) -> int:
    """Return how many positions have their logits in memory at a time, on a GPU.

    ``free`` are its bytes that are free. The number is a power of two.
    """
    elements = min(int(free * GPU_SHARE) // logit_bytes, GPU_ELEMENTS)
    return 1 << (max(elements // vocabulary, 1).bit_length() - 1)


def count_head_gradient_bytes(numbers: int, chunks: int) -> int:
    """Count the bytes that the gradient of an LM head's weight of ``numbers`` moves, in float32.

    The first chunk of logits writes it, every other one reads and writes it, and the backward pass
    scales it. The least is that of one chunk.
    """
    return _GRADIENT_BYTES * numbers * (1 + 2 * (chunks - 1) + 2)


def suits_kernels(codec: Codec | None, divergence: str) -> bool:
    """Return whether a GPU's kernels can compute this loss and write the gradient over the logits.

    They know forward KL from sampled records, and hard labels without records.
    """
    return divergence == "forward_kl" and (codec is None or codec.rules.sampled)
