"""The ranks: processes that work on one job together, one on each device.

torchrun starts them (``kd.parallel.launch``). Each holds a ``Group``, which says which rank it is,
and through which the ranks agree. A process without others has the group ``ALONE``, whose methods
change nothing, so that all code is written once.

Every method must be called by all ranks, in the same order.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from kd.errors import TrainingError

#: How long a rank waits for the others. A rank that has died is found by torchrun within a second,
#: so this is for long work of one rank, such as writing a checkpoint to a slow disk.
PATIENCE = timedelta(hours=2)
#: Seconds by which clocks of hosts may differ: torch drops a host after 15.
CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Group:
    """The number of this rank and of all ranks. Rank 0 leads: it alone reports and writes files.

    ``staged``: the ranks are the stages of a pipeline, which all work on the same sequences.
    ``lasting``: the ranks stay together after a stage, because others follow.
    ``per_host`` is the number of ranks of each host. ``channel`` is the process group through which
    they agree; None is torch's own. ``apart``: each host has a run folder of its own.
    """

    rank: int = 0
    size: int = 1
    per_host: int = 1
    staged: bool = False
    lasting: bool = False
    channel: dist.ProcessGroup | None = None
    apart: bool = False

    @property
    def leads(self) -> bool:
        """Whether this rank leads."""
        return self.rank == 0

    @property
    def leads_host(self) -> bool:
        """Whether this rank is the first of its host."""
        return self.rank % self.per_host == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    @property
    def devices(self) -> str:
        """How many devices the ranks have, and on how many hosts if there are several."""
        hosts = self.size // self.per_host
        return f"{self.size} devices" + (f" of {hosts} hosts" if hosts > 1 else "")

    @property
    def readers(self) -> Group:
        """The ranks among which sequences are dealt: all, or this one alone where it is a stage."""
        return ALONE if self.staged else self

    def add_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks; all get the same bits."""
        if not self.alone:
            dist.all_reduce(tensor, group=self.channel)
        return tensor

    def add(self, number: int) -> int:
        """Return the sum of ``number`` over all ranks."""
        return number if self.alone else int(self.add_(torch.tensor(number)))

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on some rank."""
        return self.add(int(flag)) > 0

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in their order. It holds only what JSON has."""
        if self.alone:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self.channel)
        # all_gather needs tensors of one length.
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(text, (0, longest - len(text)))
        dist.all_gather(texts, padded, group=self.channel)
        return [
            json.loads(bytes(each[: int(length)].tolist()))
            for each, length in zip(texts, lengths, strict=True)
        ]

    def share(self, value: Any) -> Any:
        """Return the ``value`` of rank 0, on every rank. It holds only what JSON has."""
        return self.gather(value if self.leads else None)[0]

    def open_channel(self) -> Group:
        """Return the same ranks with a channel of their own, for another thread of each."""
        if self.alone:
            return self
        return replace(self, channel=dist.new_group(backend="gloo", timeout=PATIENCE))

    def wait(self) -> None:
        """Wait until every rank is here."""
        if not self.alone:
            self.add(0)

    def deal(self, items: NDArray[Any]) -> NDArray[Any]:
        """Cut ``items`` into as many equal parts as there are ranks, and return this rank's."""
        size, rest = divmod(len(items), self.size)
        if rest:
            raise ValueError(f"{len(items)} items cannot be dealt to {self.size} ranks equally")
        return items[self.rank * size : (self.rank + 1) * size]


#: The group of a process without others.
ALONE = Group()


def join_group(lasting: bool = False, software: str = "") -> Group:
    """Join the ranks that torchrun has started, on one host or on several.

    Tensors in memory go through gloo and those on GPUs through NCCL. Raises ``TrainingError`` where
    torch has no NCCL, or where ranks differ in ``software``, torch or the kind of their devices.
    """
    backend, device = "gloo", "CPUs"
    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            detail = f"torch {torch.__version__} was built without NCCL, through which GPUs train."
            raise TrainingError(detail, "Install torch for CUDA on Linux, or train on one GPU.")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend, device = "cpu:gloo,cuda:nccl", "GPUs"
    dist.init_process_group(backend, timeout=PATIENCE)
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    group = Group(dist.get_rank(), dist.get_world_size(), per_host, lasting=lasting)
    require_alike(group, f"{software}torch {torch.__version__} on {device}")
    return group


def require_same_time(group: Group) -> None:
    """Raise ``TrainingError`` if clocks of hosts differ: c10d of torchrun would never end."""
    clocks = group.gather(time.time())
    if (apart := max(clocks) - min(clocks)) > CLOCK_SECONDS:
        raise TrainingError(
            f"The clocks of the hosts differ by {apart:,.0f} s.",
            "Set them, for instance by NTP, and start the same command again.",
        )


def require_alike(group: Group, own: str) -> None:
    """Raise ``TrainingError`` unless ``own`` is the same on all ranks, which would else wait."""
    found = group.gather(own)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise TrainingError(
                f"Rank {rank} has {other}, and rank 0 {found[0]}.",
                "Give all hosts the same software and the same kind of device.",
            )


def leave_group(group: Group) -> None:
    """Leave the ranks, once all of them are here; ``group`` is of no use then unless it lasts."""
    if not group.alone:
        group.wait()
        if not group.lasting:
            dist.destroy_process_group()
