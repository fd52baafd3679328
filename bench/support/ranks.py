"""Runs a function in several ranks. They fork from one prepared process, so they start at once."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
CLONE_NEWNET = 0x40000000  # linux/sched.h


@contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """Move this thread, its new processes and its connections to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as home, Path("/run/netns", name).open() as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)


def run_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, hosts: Sequence[str] = ()
) -> list[Any]:
    """Call ``function(group, *arguments)`` in ``size`` ranks, and return what each returned.

    ``hosts`` are network namespaces, with the interface net0, to which the ranks are dealt.
    Raises ``AssertionError`` with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PREPARED)
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = str(Path(folder) / "store")
            call = (rank, size, place, theirs, function, arguments, hosts)
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
    hosts: Sequence[str],
) -> None:
    import torch
    import torch.distributed as dist

    from kd.parallel.group import Group

    os.environ["GLOO_SOCKET_IFNAME"] = "net0" if hosts else "lo"
    torch.set_num_threads(1)
    per_host = size // max(len(hosts), 1)
    try:
        with inside_namespace(hosts[rank // per_host]) if hosts else nullcontext():
            dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=size)
            end.send((True, function(Group(rank, size, per_host), *arguments)))
            dist.destroy_process_group()
    except BaseException:
        end.send((False, traceback.format_exc()))
        end.close()
        # Not by returning: threads of a group whose other ranks are gone would keep this process.
        os._exit(1)
