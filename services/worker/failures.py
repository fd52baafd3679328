"""What is said of a run that failed: a stable word, what happened, and what to do about it.

out_of_memory   memory of the GPU or of the host ran out
disk_full       a disk did
worker_lost     the process was killed, or hung
internal        nobody foresaw it
...             any error of ours says its own word (kd.errors, cache.errors)
"""

from __future__ import annotations

import errno
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

from cache.errors import PotstillError, StorageError

LOG_TAIL_BYTES = 2000
OUT_OF_MEMORY, DISK_FULL, WORKER_LOST = "out_of_memory", "disk_full", "worker_lost"
SMALLER = "Lower train.batch_size, teacher.batch_size or data.sequence_length, or ask for more with resources.memory."
#: How the libraries say it where they have no class for it.
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Failure = dict[str, str]


def describe(error: BaseException) -> Failure:
    """The error as the job's record shows it; one that nobody foresaw names its class and its place."""
    if any(map(_wants_memory, _causes(error))):
        return _of_memory(error)
    if isinstance(error, PotstillError):
        full = isinstance(error, StorageError) and any(map(_wants_space, _causes(error)))
        return error.to_json() | ({"type": DISK_FULL} if full else {})
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    detail = f"{type(error).__name__}: {error}{place}"
    return failure("internal", detail, "The traceback is in log.txt in the job's run folder.")


def _of_memory(error: BaseException) -> Failure:
    """An error of ours knows what to do; of another the first line is enough, for the rest is for programmers."""
    if isinstance(error, PotstillError):
        return error.to_json() | {"type": OUT_OF_MEMORY}
    first = (str(error).splitlines() or [""])[0]
    return failure(OUT_OF_MEMORY, f"{type(error).__name__}: {first}".rstrip(": "), SMALLER)


def killed(number: int, where: str, short_of_memory: str, log_file: Path) -> Failure:
    """Of a process that was killed by a signal; ``short_of_memory`` says where the kernel killed for want of it."""
    if number == signal.SIGKILL and short_of_memory:
        detail = f"The process of {where} was killed by the kernel: the {short_of_memory} ran out of memory."
        return failure(OUT_OF_MEMORY, detail, SMALLER)
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return failure(WORKER_LOST, f"The process of {where} was killed by signal {number} ({name}).", f"See {log_file}.")


def hung(where: str, seconds: float, log_file: Path) -> Failure:
    """Of a process that was killed for its silence."""
    detail = f"The process of {where} reported nothing for {seconds:g} s and was killed."
    return failure(WORKER_LOST, detail, f"{log_file} shows where it hung; KD_SILENCE_SECONDS allows more time.")


def crashed(code: int, where: str, log_file: Path) -> Failure:
    """Of a process that ended without a word."""
    tail = log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "its log is empty"
    word, remedy = (OUT_OF_MEMORY, SMALLER) if _says_no_memory(tail) else ("internal", f"See {log_file}.")
    return failure(word, f"The process of {where} ended with exit code {code}: {tail}", remedy)


def failure(word: str, detail: str, remedy: str) -> Failure:
    """An error as the record holds it."""
    return {"type": word, "detail": detail, "remedy": remedy}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _wants_memory(error: BaseException) -> bool:
    """By the class where it has one of its own: torch, which knows it, is not imported here."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _says_no_memory(str(error))


def _says_no_memory(text: str) -> bool:
    return any(phrase in text for phrase in NO_MEMORY)


def _wants_space(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in NO_SPACE
