"""A small checkout of the repository, in which the commands of the documents run as printed.

It has the files that the commands name. The example is the real one with less text and fewer
steps, and its teacher is the real one. ``kd`` is on the path, as it is in an activated .venv.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.support.paths import AUSTEN, ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from services.store.embedded import find_free_port

#: Characters of each text of the example.
TEXT = 12_000
#: The fields of the example's jobs that decide how long they take, and their values here.
SMALL = {
    "max_steps": 12, "warmup_steps": 2, "eval_steps": 6, "save_steps": 6, "max_eval_samples": 4,
    "sequence_length": 64, "batch_size": 8,
}  # fmt: skip
#: Files of the repository that commands of the documents read or copy.
FILES = (".env.example", "Makefile", "constraints.txt", "docker-compose.yml", "pyproject.toml")
#: The address in the documents.
PRINTED = "127.0.0.1:8000"


@dataclass
class Checkout:
    """The folder, and the environment of its commands."""

    folder: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def server(self) -> str:
        """The address of the service that ``kd up`` starts here."""
        return f"http://127.0.0.1:{self.port}"

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line in the folder."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    def require(self, command: str) -> str:
        """Run a command line, which must succeed; return what it prints."""
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command line that starts the service, until the block ends."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            wait_until(lambda: process.poll() is not None or self._answers())
            assert process.poll() is None, process.communicate()[0]
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_SECONDS)

    def _answers(self) -> bool:
        try:
            ready = httpx.get(f"{self.server}/readyz", trust_env=False).is_success
            return ready and bool(self.get("/workers")["data"])
        except httpx.TransportError:
            return False

    def get(self, path: str) -> dict[str, object]:
        """Return the service's JSON at ``path``."""
        return dict(httpx.get(self.server + path, trust_env=False, timeout=60).json())


def make_checkout(folder: Path) -> Checkout:
    """Make the checkout in a new folder."""
    folder.mkdir(parents=True)
    _copy_example(folder / "examples" / "austen")
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    # -P keeps the folder itself off the path of imports, as the installed script does.
    run_kd = f'exec "{sys.executable}" -P -m services.terminal.cli "$@"\n'
    (programs / "kd").write_text(f"#!/bin/sh\n{run_kd}")
    (programs / "kd").chmod(0o755)
    checkout = Checkout(folder, find_free_port())
    # The one stand-in: another program may use the port of the documents.
    (folder / ".curlrc").write_text(
        f'silent\nshow-error\nfail-with-body\nconnect-to = "{PRINTED}:127.0.0.1:{checkout.port}"\n'
    )
    checkout.environment.update(
        PATH=f"{programs}:{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        KD_PORT=str(checkout.port),
        CURL_HOME=str(folder),
        NO_COLOR="1",
    )
    return checkout


def pretend_installed(checkout: Checkout) -> None:
    """Let ``make`` find a complete .venv, so that it installs nothing."""
    for stamp in re.findall(r"^\w+ *:= *(\.venv/\.\w+)$", (ROOT / "Makefile").read_text(), re.M):
        (checkout.folder / stamp).touch()


def _copy_example(folder: Path) -> None:
    (folder / "text").mkdir(parents=True)
    (folder / "teacher").symlink_to(AUSTEN / "teacher")
    shutil.copy(AUSTEN / "make_tokenizer.py", folder)
    for text in (AUSTEN / "text").glob("*.txt"):
        (folder / "text" / text.name).write_text(text.read_text(encoding="utf-8")[:TEXT])
    for job in AUSTEN.glob("*.yaml"):
        (folder / job.name).write_text(make_small(job.read_text(encoding="utf-8")))


def make_small(job: str) -> str:
    """A job file with the small values."""
    for name, value in SMALL.items():
        job = re.sub(rf"\b{name}: \d+", f"{name}: {value}", job)
    return job
