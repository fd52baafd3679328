"""A process that has imported the libraries already, and forks for each command that is run.

A command is a process of its own, with its own arguments, environment, files and exit code. It only
saves the seconds in which it would import torch, FastAPI and the like.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from bench.support.paths import ROOT
from kd.parallel.parent_death import die_with_parent

#: How the names of variables begin that may be others for each command. Torch sets the last one.
FREE = ("KD_", "NO_COLOR", "COLUMNS", "PYTEST_", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
#: The processes that can be warm: one for the API and the worker, and one for ``kd`` with models.
SERVICE = "service"
MODELS = "models"
#: Bytes of an answer of the server: a number and blanks.
WIDTH = 32
POLL_SECONDS = 0.01


class ForkedProcess:
    """A module that runs in a fork: the part of ``subprocess.Popen`` that tests and benches use."""

    def __init__(self, replies: IO[bytes]) -> None:
        self._replies = replies
        self.pid = int(replies.read(WIDTH))
        self.returncode: int | None = None
        self._lock = threading.Lock()  # the thread that tends a cluster polls, too

    def poll(self) -> int | None:
        """Return the exit code, which is negative after a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and select.select([self._replies], [], [], 0)[0]:
                # Nothing comes if the supervisor was killed; its child is then killed, too.
                self.returncode = int(self._replies.read(WIDTH) or -signal.SIGKILL)
                self._replies.close()
            return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the end and return the exit code; raise ``TimeoutExpired`` after ``timeout``."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """Runs modules in forks of one process. ``libraries`` is a key of ``LIBRARIES``."""

    def __init__(self, libraries: str) -> None:
        self._environment = dict(os.environ)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, libraries, str(theirs.fileno())],
                cwd=ROOT,
                env=self._environment | {"PYTHONPATH": find_packages()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def suits(self, environment: dict[str, str]) -> bool:
        """Return whether the libraries would be imported in the same way with this environment."""
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
        with (
            tempfile.TemporaryFile("w+") as stdin,
            tempfile.TemporaryFile("w+") as stdout,
            tempfile.TemporaryFile("w+") as stderr,
        ):
            stdin.write(answer)
            stdin.seek(0)
            files = [file.fileno() for file in (stdin, stdout, stderr)]
            process = self.start(module, arguments, files, folder, env)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(
                [module, *arguments], code, stdout.read(), stderr.read()
            )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        files: Sequence[int],
        folder: Path,
        env: dict[str, str],
        *,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Start ``module`` in ``folder``. The three files are its input, output and errors."""
        order = {
            "module": module,
            "arguments": arguments,
            "folder": str(folder),
            "env": env,
            "new_session": new_session,
        }
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as reply:
            handles = [*files, reply.fileno()]
            socket.send_fds(self._channel, [json.dumps(order).encode()], handles)
        return ForkedProcess(os.fdopen(reading, "rb", buffering=0))

    def close(self) -> None:
        """End the server. It ends with this process, too."""
        self._channel.close()
        self._server.wait()


def find_packages() -> str:
    """Return the path on which Python finds this project, from any folder."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@cache
def get_warm_python(libraries: str) -> WarmPython:
    """Return this process's warm Python with these libraries; the first call starts it."""
    warm = WarmPython(libraries)
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
            die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            order = dict(json.loads(letter))
            _supervise_a_fork(*handles, new_session=order["new_session"])
            return order
        for handle in handles:
            os.close(handle)


def _supervise_a_fork(
    stdin: int, stdout: int, stderr: int, reply: int, *, new_session: bool
) -> None:
    """Return in a fork that has these files. Tell ``reply`` its number and its exit code."""
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(reply, f"{code:<{WIDTH}}".encode())
        os._exit(0)
    if new_session:
        os.setsid()
    # Only now, because who has the number may signal the group of the new session.
    os.write(reply, f"{os.getpid():<{WIDTH}}".encode())
    for number, handle in enumerate((stdin, stdout, stderr)):
        os.dup2(handle, number)
        os.close(handle)
    os.close(reply)


def import_service() -> None:
    """Import what the API and the worker import."""
    import celery.app.trace  # noqa: F401
    import kombu.transport.redis  # noqa: F401
    import uvicorn  # noqa: F401
    from celery.worker import worker  # noqa: F401

    import services.api.app
    import services.worker.consumer  # noqa: F401


def import_models() -> None:
    """Import what ``kd`` imports for models, none of which reads a variable of ``FREE``."""
    import datasets  # noqa: F401
    import httpx  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import rich.console
    import rich.table  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import typer  # noqa: F401

    import kd.examine
    import kd.forecast.rehearsal
    import kd.pipeline
    import kd.preflight.validate  # noqa: F401
    import services.store.jobs.store  # noqa: F401


LIBRARIES = {SERVICE: import_service, MODELS: import_models}


def main() -> None:
    """Import the libraries, then serve; in a fork, run its module and end."""
    LIBRARIES[sys.argv[1]]()
    gc.freeze()  # a collection in a fork would copy the pages of all that is imported
    order = serve(socket.socket(fileno=int(sys.argv[2])))
    if order is not None:
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        sys.path[0] = order["folder"]
        sys.argv[1:] = order["arguments"]
        leave(order["module"])


def leave(module: str) -> NoReturn:
    """Run ``module`` as ``python -m`` does, and end the process with its exit code.

    Python would last take the imported modules apart, which costs half a second of one core.
    """
    code = run_to_its_code(module)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_to_its_code(module: str) -> int:
    """Run ``module`` and return its exit code; a negative one is the signal that must end it."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return (end.code or 0) & 0xFF  # as the system cuts it
    except BaseException as error:
        traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    main()
