"""Compile the C++ half of the simulated GPU, and load it before torch is imported.

torch looks for a device's hooks once, when it is first asked for the device.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def find_compiler() -> str | None:
    """Return the path of the C++ compiler, or None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def load_library() -> None:
    """Compile the library unless it exists, and load it into this process."""
    ctypes.CDLL(str(compile_library()))


def compile_library() -> Path:
    """Return the library for the installed torch; it is compiled once for each version of both.

    It finds torch by its path, so that another environment needs another library.
    """
    spec = importlib.util.find_spec("torch")
    installed = f"{importlib.metadata.version('torch')} {spec and spec.origin}"
    name = hashlib.sha256(SOURCE.read_bytes() + installed.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"potstill-simulated-gpu-{os.getuid()}" / f"{name}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None or spec is None or spec.origin is None:
        raise RuntimeError("the simulated GPU needs torch and a C++ compiler on PATH")
    torch = Path(spec.origin).parent
    library.parent.mkdir(mode=0o700, exist_ok=True)
    # Two processes may compile at the same time; each renames a whole file.
    unfinished = library.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [
            compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}",
            str(SOURCE), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}",
            "-lc10", "-ltorch_cpu", "-o", str(unfinished),
        ],
        check=True,
    )  # fmt: skip
    unfinished.rename(library)
    return library
