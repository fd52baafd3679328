"""Locks that a file system lacks, or that do nothing, are found before anything relies on them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import ROOT
from bench.support.small.caches import make_cache
from cache import disk
from cache.disk import require_locks
from cache.reading.usage import exclude_readers, held, is_read

#: A C library's call of a file system without locks, and of one whose locks always say yes.
NONE = "#include <errno.h>\nint flock(int f, int o) { errno = %s; return -1; }"
ALWAYS = "int flock(int f, int o) { return 0; }"
#: The same below one folder, BAD; elsewhere the system's own.
SOME = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int flock(int file, int operation) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    readlink(link, path, sizeof path - 1);
    return strstr(path, getenv("BAD")) ? 0 : syscall(SYS_flock, file, operation);
}
"""
KD = f"{sys.executable} -m services.terminal.cli"
LOCK_A_RUN = """
import pathlib, sys
from kd.python.running import alone_in
with alone_in(pathlib.Path(sys.argv[1]), print, "--run-dir"):
    (pathlib.Path(sys.argv[1]) / "config.json").touch()
"""

Preload = Callable[[str], dict[str, str]]


@pytest.fixture
def preload(tmp_path: Path) -> Preload:
    """Return the environment in which every process has another ``flock``."""

    def build(source: str) -> dict[str, str]:
        library = tmp_path / "flock.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
        subprocess.run(command, input=source, text=True, check=True)
        return os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}

    return build


def run(code: str, *words: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


def test_locks_that_work_are_no_error_and_leave_no_file(tmp_path: Path) -> None:
    require_locks(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ALWAYS, "do nothing"),
        (NONE % "ENOSYS", "not implemented"),
        (NONE % "ENOLCK", "No locks"),
        (NONE % "EOPNOTSUPP", "not supported"),
    ],
)
def test_locks_that_are_missing_or_do_nothing_are_a_storage_error(
    tmp_path: Path, preload: Preload, source: str, words: str
) -> None:
    env = preload(source)
    code = "import sys; from pathlib import Path; from cache.disk import require_locks\n"
    done = run(f"{code}require_locks(Path(sys.argv[1]))", tmp_path, env=env)
    assert "StorageError" in done.stderr and str(tmp_path) in done.stderr
    assert words in done.stderr and "nolock" in done.stderr, "the mount option is named"
    code = "import sys; from pathlib import Path\n"
    code += "from services.terminal.commands.doctor import _check_folder\n"
    told = run(f"{code}print(*_check_folder('KD_HOME', Path(sys.argv[1])))", tmp_path, env=env)
    assert "what='locks', ok=False" in told.stdout and words in told.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "bad"),
    [
        (f"{KD} worker", "home"),
        (f"{KD} worker", "store"),
        (f"{KD} run examples/austen/job.yaml --home $KD_HOME --run-dir $RUN", "home"),
        (f"{sys.executable} -c '{LOCK_A_RUN}' $RUN", "run"),
    ],
    ids=["worker home", "worker store", "run home", "alone in run"],
)
def test_nothing_starts_to_write_where_locks_do_nothing(
    tmp_path: Path, preload: Preload, command: str, bad: str
) -> None:
    names = {"KD_HOME": "home", "KD_STORE": "store", "RUN": "run"}
    places = {name: str(tmp_path / folder) for name, folder in names.items()}
    env = preload(SOME) | places | {"BAD": str(tmp_path / bad), "KD_REDIS_URL": "redis://[::1]:1"}
    done = subprocess.run(
        ["sh", "-c", command], env=env, capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert f"Locks in {tmp_path / bad} do nothing" in " ".join(done.stderr.split())
    assert done.returncode != 0 and not (tmp_path / "run" / "config.json").exists()


def test_no_exclusive_lock_is_asked_for_on_a_file_that_is_open_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS makes an exclusive lock of a range for writing, which needs a file open for writing."""
    flock = fcntl.flock

    def flock_of_nfs(file: Any, operation: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(number, operation)

    monkeypatch.setattr(disk.fcntl, "flock", flock_of_nfs)
    folder = make_cache(tmp_path)
    with held(folder):
        assert is_read(folder)
    assert not is_read(folder)
    with exclude_readers(folder):
        pass
