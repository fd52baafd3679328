"""Write the files of a run so that each appears whole or not at all, on top of ``cache.disk``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cache import disk
from cache.errors import StorageError
from cache.remote.address import bind_caches
from kd.errors import ModelError, TrainingError

#: File in a run folder that the writing process locks.
LOCK = ".lock"
#: The folder of a run that holds the files of workers which helped with its capture.
HELPERS = "helpers"
#: The folder in a run folder through which its ranks get their order.
RANKS = "ranks"
#: File in a run folder that tells the format of the folder.
MARK = "run.json"
#: File beside a student that has its job and its report.
PROVENANCE = "distillation.json"
#: A name below a folder, as JSON.
_NAME_IN_FOLDER = re.compile(r'"([^"\\]+/[^"\\]*)"')
#: The format that this version writes, and that of a folder without the file.
RUN_FORMAT = 1


#: How a file begins that Git keeps in place of a large one, and more bytes than it has.
_LFS_BEGIN = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024
LFS_REMEDY = "Fetch the files themselves: git lfs pull."

#: Files for which a disk must have room, or nothing new begins: a shard of a cache is some tens.
FREE_FILES = 1000

#: The operator's settings of where caches lie; a worker hands them to its processes.
STORE_VARIABLE = "KD_STORE"
MIRROR_VARIABLE = "KD_STORE_CACHE_BYTES"


def find_caches(home: Path, store: str | None) -> Path:
    """Return the folder of the caches of ``store``, or the one that mirrors its bucket.

    Without a store it is that of KD_STORE, else ``caches`` in ``home``. Raises ``StoreError`` for a
    wrong address.
    """
    size = os.environ.get(MIRROR_VARIABLE, "")
    return bind_caches(
        home,
        store or os.environ.get(STORE_VARIABLE) or None,
        int(size) if size.isdecimal() and int(size) else None,
    )


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends without an error, it replaces ``final``.

    From the first time on a whole ``final`` exists, except after a kill between two renames, which
    ``recover_folder`` repairs.
    """
    # Beside the final folder, because a rename is atomic only within a file system.
    temporary = locate_temporary(final)
    with _disk_errors(final.parent):
        disk.make_folder(final.parent)
        disk.recover_folder(final)
        disk.remove_path(temporary)  # a killed process may have left it
        temporary.mkdir()
        try:
            yield temporary
            # All files get the rights that the umask leaves: safetensors lets only the owner read.
            rights = temporary.stat().st_mode & 0o666
            for path in temporary.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    path.chmod(path.stat().st_mode | rights)
            disk.publish_folder(temporary, final)
        finally:
            disk.remove_path(temporary)


def locate_temporary(final: Path) -> Path:
    """Return the path at which ``whole_folder`` lets ``final`` be filled."""
    return final.with_name(disk.TEMPORARY_PREFIX + final.name)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one atomic step."""
    with _disk_errors(path.parent):
        disk.make_folder(path.parent)
        disk.write_file(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON. Raises ``ValueError`` for NaN, which JSON lacks."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read the JSON at ``path``; return None if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def is_lfs_pointer(path: Path) -> bool:
    """Return whether ``path`` is no file with content, but a pointer of Git LFS to one."""
    if not path.is_file() or path.stat().st_size >= _LFS_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(len(_LFS_BEGIN)) == _LFS_BEGIN


def find_run(name: str, runs: Path) -> Path | None:
    """Find the run below ``runs`` with that name, or the only one whose name begins with it.

    ``last`` means the run that began last. The job_ of a job's id may be left out. None where no
    run has that name; raises ``ModelError`` if several have it.
    """
    folders = sorted(folder for folder in runs.glob("[!.]*") if folder.is_dir())
    if name == "last":
        if not folders:
            raise ModelError(f"there is no run under {runs}.", "Run a job first, or name a model.")
        return max(folders, key=_get_start_time)
    exact = [folder for folder in folders if folder.name == name]
    found = exact or [
        folder for folder in folders if name and folder.name.startswith((name, f"job_{name}"))
    ]
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found[:5])
        remedy = "Give more of the name, or the owner/name of a model of the hub."
        raise ModelError(f"{name!r} names {len(found)} runs under {runs}: {names}.", remedy)
    return found[0] if found else None


def _get_start_time(run: Path) -> float:
    """Return the time at which a run began, which is when its config.json was written.

    The folder's own time is later, for example after an evaluation.
    """
    job = run / "config.json"
    return (job if job.is_file() else run).stat().st_mtime


def require_known_run(run_dir: Path) -> None:
    """Raise ``TrainingError`` if a newer version wrote the run folder."""
    mark = read_json(run_dir / MARK)
    found = RUN_FORMAT if mark is None else int(mark["format"])
    if found > RUN_FORMAT:
        raise TrainingError(
            f"{run_dir} has run format {found}, but this version reads {RUN_FORMAT}.",
            "Go on with the version that began the run or a newer one, or use another run folder.",
        )


@contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    """Turn disk errors into ``StorageError``, also the one that safetensors has for a full disk."""
    try:
        with disk.storage_errors(where):
            yield
    except SafetensorError as error:
        if "No space left" not in str(error):
            raise
        detail = f"{where}: no space left on the disk."
        raise StorageError(detail, "Free space, then run again.") from error


@dataclass(frozen=True)
class Disk:
    """The disk of a folder. ``free_files``: how many more it takes (inodes); None = any number."""

    total_bytes: int
    free_bytes: int
    free_files: int | None

    @classmethod
    def of(cls, folder: Path) -> Disk:
        """Ask the disk of ``folder``, which need not exist yet."""
        found = os.statvfs(disk.find_existing(folder))
        block = found.f_frsize
        files = found.f_favail if found.f_files else None
        return cls(found.f_blocks * block, found.f_bavail * block, files)

    def find_shortage(self, size: int, files: int = FREE_FILES) -> str | None:
        """Say what is left where the disk lacks ``size`` bytes or room for ``files`` more files."""
        if self.free_bytes < size:
            return f"{format_bytes(self.free_bytes)} left, and {format_bytes(size)} are needed"
        if self.free_files is not None and self.free_files < files:
            return f"room for {self.free_files} files (inodes), and {files} are needed"
        return None


def measure_free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of ``folder``, which need not exist yet."""
    return Disk.of(folder).free_bytes


def format_bytes(size: float) -> str:
    """Return a number of bytes with its unit, for messages."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def hide_folders(text: str, record: object) -> str:
    """Leave in ``text`` the last part of each local path in ``record``, the JSON of a job.

    Folders of this machine mean nothing to a reader elsewhere.
    """
    names = set(_NAME_IN_FOLDER.findall(json.dumps(record, ensure_ascii=False)))
    for name in sorted(names, key=len, reverse=True):
        is_there = os.path.exists(name)  # noqa: PTH110  Path raises for an impossible name
        if Path(name).name and (is_there or Path(name).is_absolute()):
            text = text.replace(name, Path(name).name)
    return text
