"""An API without descriptors: it says so once, refuses with 503, and goes on."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.client.wire.problems import ProblemDetails
from services.process.descriptors import raise_limit
from tests.support.services.api import UNLIMITED

FEW = 64
#: Streams that are open before the others come at once.
FIRST = 12


@pytest.mark.long
def test_more_streams_than_descriptors_are_refused_and_told_once(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts(**UNLIMITED)
    job = parts.jobs.create(make_config("waits")).id
    log = parts.settings.home / "api.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", f"ulimit -n {FEW}; exec {sys.executable} -m services.api"],
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=os.environ | parts.settings.environment(),
        )
    streams: list[socket.socket] = []
    try:
        wait_until(lambda: parts.answers("/healthz"), 120)
        request = f"GET /jobs/{job}/events/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        answers = []
        for number in range(FEW + 20):
            streams.append(socket.create_connection(("127.0.0.1", parts.settings.port)))
            streams[-1].settimeout(15)
            streams[-1].sendall(request)
            if number < FIRST:
                # A slow API would accept the others first, and have no descriptor for any stream.
                answers.append(_read_status(streams[-1]))
        time.sleep(3)
        answers += [_read_status(each) for each in streams[FIRST:]]
        assert answers.count(200) > 10 and set(answers) == {200, 503}, answers
        refused = streams[answers.index(503)]
        assert parts.http.get(f"/jobs/{job}").status_code == 200, "requests are still answered"
        head, _, body = _read_rest(refused).partition(b"\r\n\r\n")
        assert b"retry-after: 2" in head.lower()
        document = ProblemDetails.model_validate_json(body)
        assert document.type == "urn:potstill:problem:descriptors-used-up"
    finally:
        for each in streams:
            each.close()
        process.terminate()
        process.wait()
    lines = log.read_text().splitlines()
    assert len([line for line in lines if "no descriptor is left" in line]) == 1, lines[-5:]
    assert len(lines) < 4 * FEW, "a line for each request, and no flood"


def _read_status(stream: socket.socket) -> int:
    """Read the status line and leave the rest."""
    return int(stream.recv(12).split()[1])


def _read_rest(stream: socket.socket) -> bytes:
    found = b""
    while part := stream.recv(1 << 16):
        found += part
    return found


def test_the_soft_limit_is_raised_as_far_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
