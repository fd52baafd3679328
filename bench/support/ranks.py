"""Runs a function in several ranks. They fork from one prepared process, so they start at once."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Modules that the prepared process imports once.
PREPARED = [
    "bench.support.ranks",
    "bench.devices.scale",
    "kd.pipeline",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
]
#: Seconds that the ranks may take.
PATIENCE = 300.0


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(group, *arguments)`` in ``size`` ranks, and return what each returned.

    Raises ``AssertionError`` with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PREPARED)
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = str(Path(folder) / "store")
            call = (rank, size, place, theirs, function, arguments)
            process = context.Process(target=_run_rank, args=call)
            process.start()
            theirs.close()
            ends.append((process, ours))
        try:
            return [_receive(ours) for _, ours in ends]
        finally:
            for process, _ in ends:
                process.join(5)
                process.kill()


def _receive(end: Connection) -> Any:
    assert end.poll(PATIENCE), "the ranks do not answer"
    ok, value = end.recv()
    assert ok, value
    return value


def _run_rank(
    rank: int,
    size: int,
    place: str,
    end: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from kd.parallel.group import Group

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=size)
        end.send((True, function(Group(rank, size), *arguments)))
        dist.destroy_process_group()
    except BaseException:
        end.send((False, traceback.format_exc()))
        end.close()
        # Not by returning: threads of a group whose other ranks are gone would keep this process.
        os._exit(1)
