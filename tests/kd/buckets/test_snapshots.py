"""Models of a hub on loopback: what comes, and what is said while it comes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from tests.support.hub.fake_hub import FakeHub

#: The file of the weights, and its bytes.
WEIGHTS = "model.safetensors"
BYTES = 96 << 20

BRING = """
import json, sys
from pathlib import Path
from kd.buckets.inputs import begin_downloads
from kd.errors import Interrupted
from kd.models.folder import resolve_model

lines = []

def report(line):
    lines.append(line)
    if sys.argv[1] == "give up":
        raise Interrupted("Stopped on request.", "Run it again.")

begin_downloads(Path("home"), report)
try:
    found = str(resolve_model("org/model"))
except Interrupted as error:
    found = error.detail
print(json.dumps([found, lines]))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        running.make("model", "org/model")
        running.change("model", "org/model", "config.json", b"{}")
        running.change("model", "org/model", "notes.pdf", bytes(1 << 20))
        running.change("model", "org/model", WEIGHTS, os.urandom(1024) * (BYTES // 1024))
        yield running


def bring(hub: FakeHub, folder: Path, how: str = "") -> tuple[str, list[str]]:
    """Bring the model in a new process, as ``huggingface_hub`` reads its environment at import."""
    done = subprocess.run(
        [sys.executable, "-c", BRING, how],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(folder / "huggingface"),
        },
    )
    assert done.returncode == 0, done.stderr
    found, lines = json.loads(done.stdout)
    return found, lines


@pytest.mark.long
def test_a_long_download_tells_what_has_come_its_rate_and_the_time_left(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.seconds = 6.0
    found, lines = bring(hub, tmp_path)
    assert (Path(found) / WEIGHTS).read_bytes() == hub.files("model", "org/model")[WEIGHTS]
    assert not (Path(found) / "notes.pdf").exists()
    form = r"downloading org/model: [\d.]+ MiB of 96 MiB, [\d.]+ MiB a second, \d+ s left"
    assert len(lines) >= 2
    assert re.fullmatch(form, lines[-1]), lines
    hub.seconds = 0.0
    assert bring(hub, tmp_path) == (found, [])


@pytest.mark.long
def test_a_download_stops_on_request_and_whole_files_stay(hub: FakeHub, tmp_path: Path) -> None:
    hub.seconds = 8.0
    told, lines = bring(hub, tmp_path, "give up")
    assert (told, len(lines)) == ("Stopped on request.", 1)
    hub.seconds = 0.0
    hub.served.clear()
    found, _ = bring(hub, tmp_path)
    assert (Path(found) / WEIGHTS).read_bytes() == hub.files("model", "org/model")[WEIGHTS]
    assert set(hub.served) == {WEIGHTS}
