"""A process that has imported the libraries already, and forks for each command that is run.

A command is a process of its own, with its own arguments, environment, files and exit code. It only
saves the seconds in which it would import torch and the like. The code of this project is imported
anew each time.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from bench.support.paths import ROOT

#: How the names of variables begin that may be others for each command. Torch sets the last one.
FREE = ("KD_", "NO_COLOR", "COLUMNS", "PYTEST_", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
#: Bytes of an answer of the server: a number and blanks.
WIDTH = 32


class WarmPython:
    """Runs modules in forks of one process."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=self._environment | {"PYTHONPATH": find_packages()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def suits(self, environment: dict[str, str]) -> bool:
        """Whether the libraries would be imported in the same way with this environment."""
        names = environment.keys() | self._environment.keys()
        return all(
            environment.get(name) == self._environment.get(name)
            for name in names
            if not name.startswith(FREE)
        )

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        answer: str,
        folder: Path,
        env: dict[str, str],
        seconds: float,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``module`` in ``folder``, as ``python -m`` does.

        The text of ``answer`` is its standard input.
        """
        order = {"module": module, "arguments": arguments, "folder": str(folder), "env": env}
        with (
            tempfile.TemporaryFile("w+") as stdin,
            tempfile.TemporaryFile("w+") as stdout,
            tempfile.TemporaryFile("w+") as stderr,
        ):
            stdin.write(answer)
            stdin.seek(0)
            code = self._wait(json.dumps(order), [stdin, stdout, stderr], seconds)
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(
                [module, *arguments], code, stdout.read(), stderr.read()
            )

    def _wait(self, order: str, files: list[IO[str]], seconds: float) -> int:
        """Send the order; return the exit code, which is negative after a signal."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb", buffering=0) as replies:
            with os.fdopen(writing, "wb") as reply:
                handles = [file.fileno() for file in (*files, reply)]
                socket.send_fds(self._channel, [order.encode()], handles)
            pid = int(replies.read(WIDTH))
            if not select.select([replies], [], [], seconds)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(order, seconds)
            return int(replies.read(WIDTH))

    def close(self) -> None:
        """End the server. It ends with this process, too."""
        self._channel.close()
        self._server.wait()


def find_packages() -> str:
    """The path on which Python finds this project, from any folder."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@cache
def get_warm_python() -> WarmPython:
    """The one of this process, started at the first call."""
    warm = WarmPython()
    atexit.register(warm.close)
    return warm


# ---------------------------------------------------------------------- the server


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each order, and return it in the fork. Return None when the channel ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the supervisors
    while True:
        letter, handles, _, _ = socket.recv_fds(channel, 1 << 18, 4)
        if not letter:
            return None
        if os.fork() == 0:
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise_a_fork(*handles)
            return dict(json.loads(letter))
        for handle in handles:
            os.close(handle)


def _supervise_a_fork(stdin: int, stdout: int, stderr: int, reply: int) -> None:
    """Return in a fork that has these files. Tell ``reply`` its number and its exit code."""
    if pid := os.fork():
        os.write(reply, f"{pid:<{WIDTH}}".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(reply, f"{code:<{WIDTH}}".encode())
        os._exit(0)
    for number, handle in enumerate((stdin, stdout, stderr)):
        os.dup2(handle, number)
        os.close(handle)
    os.close(reply)


def import_libraries() -> None:
    """Import what takes long, and reads no variable of ``FREE`` meanwhile."""
    import celery  # noqa: F401
    import datasets  # noqa: F401
    import httpx  # noqa: F401
    import peft  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pydantic_settings  # noqa: F401
    import redis  # noqa: F401
    import rich.console
    import rich.table  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.modeling_utils
    import transformers.models.auto
    import transformers.models.llama.modeling_llama  # noqa: F401
    import typer  # noqa: F401
    import zarr  # noqa: F401


def main() -> None:
    """Import the libraries, then serve; in a fork, run its module."""
    import_libraries()
    gc.freeze()  # a collection in a fork would copy the pages of all that is imported
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        sys.path[0] = order["folder"]
        sys.argv[1:] = order["arguments"]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
