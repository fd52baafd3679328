"""The error of a failed run: a stable type, what happened, and the remedy.

out_of_memory   the GPU or the host ran out of memory
disk_full       a disk is full
worker_lost     the process was killed, or hung
internal        any unexpected error
...             a PotstillError has its own type (kd.errors, cache.errors)
"""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from cache.errors import PotstillError, StoreError
from kd.errors import is_out_of_memory, says_out_of_memory
from kd.files import format_bytes

#: Bytes of the log that an error quotes.
LOG_TAIL_BYTES = 2000
#: Bytes before them that are read too: more than the longest secret, which may be cut otherwise.
AROUND_BYTES = 4096
OUT_OF_MEMORY = "out_of_memory"
DISK_FULL = "disk_full"
WORKER_LOST = "worker_lost"
INTERNAL = "internal"
MEMORY_REMEDY = (
    "Lower train.batch_size, teacher.batch_size or data.sequence_length, or ask for more with "
    "resources.memory."
)
DISK_REMEDY = "Free space on the disk (kd gc, kd cache rm), or raise its quota, then retry the job."
#: Phrases of libraries that have no number for this error: the texts of ENOSPC and EDQUOT.
NO_SPACE_PHRASES = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
#: Numbers of OSError for a full disk, a quota and a limit on the size of a file.
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Failure = dict[str, str]


def describe_error(error: BaseException) -> Failure:
    """The error as the job's record shows it. An unexpected error names its class and place."""
    kind = ""
    if any(map(is_out_of_memory, _list_causes(error))):
        kind, remedy = OUT_OF_MEMORY, MEMORY_REMEDY
    elif any(map(_is_out_of_space, _list_causes(error))):
        kind, remedy = DISK_FULL, DISK_REMEDY
    if isinstance(error, PotstillError):  # only such an error has a remedy of its own
        return error.to_json() | ({"type": kind} if kind else {})
    if kind:
        # The other lines of CUDA's message are for programmers.
        text = str(error).partition("\n")[0] if kind == OUT_OF_MEMORY else str(error)
        return make_failure(kind, f"{type(error).__name__}: {text}".rstrip(": "), remedy)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    detail = f"{type(error).__name__}: {error}{place}"
    return make_failure(INTERNAL, detail, "The traceback is in log.txt in the job's run folder.")


def is_passing(error: BaseException) -> bool:
    """Whether another attempt may well succeed: a bucket did not answer, or was busy."""
    return any(isinstance(each, StoreError) and each.passing for each in _list_causes(error))


def describe_memory_limit(where: str, limit_bytes: int, least_bytes: int | None) -> Failure:
    """Describe a process that was killed because it needed more memory than its limit.

    ``least_bytes`` is the estimate of what the job's models need; None if that is unknown.
    """
    detail = (
        f"The process of {where} was killed: it needed more than {format_bytes(limit_bytes)} of "
        f"memory, its limit.{_describe_least_memory(least_bytes)}"
    )
    return make_failure(OUT_OF_MEMORY, detail, MEMORY_REMEDY)


def _describe_least_memory(least_bytes: int | None) -> str:
    if least_bytes is None:
        return ""
    return (
        f" Its models need at least about {format_bytes(least_bytes)} for weights, gradients and "
        "optimiser, and more for activations."
    )


def describe_kill(
    number: int, where: str, short_of_memory: str, log_file: Path, least_bytes: int | None = None
) -> Failure:
    """Describe a process that a signal killed.

    ``short_of_memory`` is "container" or "host" if the kernel killed there to free memory, else "".
    ``least_bytes`` is the estimate of what the job's models need.
    """
    if number == signal.SIGKILL and short_of_memory:
        detail = (
            f"The process of {where} was killed by the kernel: "
            f"the {short_of_memory} ran out of memory.{_describe_least_memory(least_bytes)}"
        )
        return make_failure(OUT_OF_MEMORY, detail, MEMORY_REMEDY)
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    detail = f"The process of {where} was killed by signal {number} ({name})."
    return make_failure(WORKER_LOST, detail, f"See {log_file}.")


def describe_hang(where: str, seconds: float, log_file: Path) -> Failure:
    """Describe a process that was killed because it was silent."""
    detail = f"The process of {where} reported nothing for {seconds:g} s and was killed."
    remedy = f"{log_file} shows where it hung; KD_SILENCE_SECONDS allows more time."
    return make_failure(WORKER_LOST, detail, remedy)


def describe_lost_host(what: str) -> Failure:
    """Describe an attempt on several hosts that ended because of one of them."""
    remedy = "The next attempt continues from the newest checkpoint, on as many hosts."
    return make_failure(WORKER_LOST, f"A host of this training is lost. {what}", remedy)


def describe_crash(
    code: int, where: str, log_file: Path, hide: Callable[[str], str] = str
) -> Failure:
    """Describe a process that ended without an error event; ``hide`` masks secrets of its log."""
    tail = hide(_read_end(log_file))[-LOG_TAIL_BYTES:].strip()
    shown = tail or "its log is empty"
    detail = f"The process of {where} ended with exit code {code}: {shown}"
    if says_out_of_memory(shown):
        return make_failure(OUT_OF_MEMORY, detail, MEMORY_REMEDY)
    if any(phrase in shown for phrase in NO_SPACE_PHRASES):
        return make_failure(DISK_FULL, detail, DISK_REMEDY)
    return make_failure(INTERNAL, detail, f"See {log_file}.")


def _read_end(log_file: Path) -> str:
    """Read the end of a log, which may be long; empty for one that is gone."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES - AROUND_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def make_failure(kind: str, detail: str, remedy: str) -> Failure:
    """An error as the record contains it."""
    return {"type": kind, "detail": detail, "remedy": remedy}


def _list_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_out_of_space(error: BaseException) -> bool:
    """Whether a disk was full. Libraries written in Rust or C++ tell it in words alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_SPACE
    return any(phrase in str(error) for phrase in NO_SPACE_PHRASES)
