"""What the version before has begun, the present version finishes: trainings to the bit.

Both run the same small job of the example, one after the other in one data folder. The version
before comes out of the history.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.checking.verify import verify_cache
from cache.disk import hash_file, list_file_sizes
from cache.profiles.table import PROFILES
from cache.store import open_cache
from tests.support.checkout import Checkout, make_checkout

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("_server_binary")]

#: Enough steps and shards that a signal finds the run in the middle of them.
STEPS = 200
JOB = "examples/austen/job.yaml"
DATA = "potstill-data"
CHANGES = {
    "train.max_steps": STEPS, "train.save_steps": 50, "train.eval_steps": 100,
    "cache.shard_sequences": 8,
}  # fmt: skip
SET = " ".join(f"--set {name}={value}" for name, value in CHANGES.items())
#: The commit of the version before, in full. A release sets it to the commit of the release before.
BEFORE = "8cefb8806101d937cb4055baf3301cd5a8cd4600"


#: A commit whose checkpoints have the format of today's, and less in their records.
EARLY = "2f65502"


def unpack(commit: str, folder: Path) -> Path:
    """The packages of a version, out of the history."""
    packages = ["cache", "kd", "services", "pyproject.toml"]
    done = subprocess.run(["git", "archive", commit, *packages], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"this clone has no commit {commit[:12]}: fetch its whole history")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the version before."""
    return unpack(BEFORE, tmp_path_factory.mktemp("before"))


def run_alone(folder: Path, packages: Path) -> dict[str, str]:
    """The outcome of the job in one version alone."""
    checkout = make_checkout(folder / "checkout")
    checkout.environment["PYTHONPATH"] = str(packages)
    checkout.require(f"kd run {JOB} {SET}")
    return hash_outcome(checkout)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path / "checkout")


def hash_outcome(checkout: Checkout) -> dict[str, str]:
    """The digests of the student's weights and of the arrays of its cache, the only sealed one."""
    (student,) = checkout.folder.glob(f"{DATA}/runs/*/student/model.safetensors")
    (folder,) = (path.parent for path in checkout.folder.glob(f"{DATA}/caches/*/manifest.json"))
    assert verify_cache(folder) == []
    shards = folder / "shards"
    arrays = {name: hash_file(shards / name) for name in list_file_sizes(shards)}
    return {"student": hash_file(student), "cache": folder.name, **arrays}


@contextmanager
def serving(checkout: Checkout, packages: Path) -> Iterator[None]:
    """Run the whole service of a version, and stop it as an operator does: SIGTERM to ``kd up``."""
    checkout.environment["PYTHONPATH"] = str(packages)
    with checkout.serving("kd up"):
        yield


def read_job(checkout: Checkout, job_id: str) -> dict[str, Any]:
    return checkout.get(f"/jobs/{job_id}")


def read_newest_step(checkout: Checkout) -> int:
    """The step of the newest checkpoint on the disk; 0 if there is none."""
    states = sorted(checkout.folder.glob(f"{DATA}/runs/*/checkpoints/step-*/state.json"))
    return json.loads(states[-1].read_text())["progress"]["step"] if states else 0


def read_manifests(checkout: Checkout) -> dict[str, bytes]:
    found = checkout.folder.glob(f"{DATA}/caches/*/manifest.json")
    return {path.parent.name: path.read_bytes() for path in found}


def test_a_job_that_the_version_before_has_begun_is_finished_to_the_bit(
    before: Path, checkout: Checkout, tmp_path: Path
) -> None:
    with serving(checkout, before):
        job_id = checkout.require(f"kd submit {JOB} {SET} --detach").strip()
        wait_until(lambda: read_newest_step(checkout) > 0)
    # The stop has saved a checkpoint of its own.
    assert 0 < read_newest_step(checkout) < STEPS
    sealed = read_manifests(checkout)
    checkout.environment["PYTHONPATH"] = str(ROOT)
    with serving(checkout, ROOT):
        job = wait_until(lambda: (found := read_job(checkout, job_id))["finished_at"] and found)
    assert (job["status"], job["attempt"]) == ("succeeded", 1), job["error"]
    # As the version before would have finished it: it had drawn the first weights of the student.
    assert hash_outcome(checkout) == run_alone(tmp_path / "alone", before)
    assert read_manifests(checkout) == sealed, "the cache of the version before was read as it is"


def run_until(checkout: Checkout, packages: Path, reached: Callable[[], bool]) -> None:
    """Run the job in a version, and stop it once it has ``reached`` a place."""
    checkout.environment["PYTHONPATH"] = str(packages)
    process = subprocess.Popen(
        ["bash", "-c", f"exec kd run {JOB} {SET}"],
        cwd=checkout.folder,
        env=os.environ | checkout.environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(reached)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)


def test_a_job_whose_capture_the_version_before_has_begun_captures_all_of_it_anew(
    before: Path, checkout: Checkout, tmp_path: Path
) -> None:
    # Records of profile threshold have another form since: no cache has both.
    seals = f"{DATA}/caches/*/seals/00*.json"
    run_until(checkout, before, lambda: any(checkout.folder.glob(seals)))
    assert read_manifests(checkout) == {}, "the capture had ended before the signal came"
    begun = {path: path.read_bytes() for path in checkout.folder.glob(seals)}
    checkout.environment["PYTHONPATH"] = str(ROOT)
    checkout.require(f"kd run {JOB} {SET}")
    assert hash_outcome(checkout) == run_alone(tmp_path / "alone", ROOT)
    assert {path: path.read_bytes() for path in begun} == begun


def test_a_run_that_the_version_before_has_begun_goes_on_with_its_cache(
    before: Path, checkout: Checkout, tmp_path: Path
) -> None:
    run_until(checkout, before, lambda: read_newest_step(checkout) > 0)
    assert 0 < read_newest_step(checkout) < STEPS
    sealed = read_manifests(checkout)
    checkout.environment["PYTHONPATH"] = str(ROOT)
    checkout.require(f"kd run {JOB} {SET}")
    assert hash_outcome(checkout) == run_alone(tmp_path / "alone", before)
    assert read_manifests(checkout) == sealed, "nothing was captured again"


#: A job without a teacher: caches of the early version have another format.
ALONE = """
kind: train
data: {train: [examples/austen/text], sequence_length: 64, packing: true}
loss: {alpha: 1.0}
student: {init: {tokenizer: examples/austen/teacher, layers: 1, hidden_size: 32}}
train: {max_steps: 120, save_steps: 20, batch_size: 2, eval_steps: 60}
"""


@pytest.mark.parametrize("commit", [EARLY, BEFORE])
def test_a_training_that_an_earlier_version_has_begun_goes_on_with_the_same_job_file(
    commit: str, checkout: Checkout, tmp_path: Path
) -> None:
    packages = unpack(commit, tmp_path)
    checkout.environment["PYTHONPATH"] = str(packages)
    (checkout.folder / "alone.yaml").write_text(ALONE, encoding="utf-8")
    # The command of that version, whose module has moved since.
    project = tomllib.loads((packages / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["kd"].split(":")
    process = subprocess.Popen(
        [sys.executable, "-Pc", f"import {module}; {module}.{function}()", "run", "alone.yaml"],
        cwd=checkout.folder,
        env=os.environ | checkout.environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: read_newest_step(checkout) > 0 or process.poll() is not None)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)
    step = read_newest_step(checkout)
    assert 0 < step < 120
    (run,) = checkout.folder.glob(f"{DATA}/runs/*")
    record = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert ("lm_head_floor" in record["train"]) == (commit == BEFORE)
    checkout.environment["PYTHONPATH"] = str(ROOT)
    checkout.require("kd run alone.yaml")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    steps = [entry["step"] for entry in entries if entry["type"] == "metrics"]
    assert steps == list(range(10, 121, 10)), "no step was done twice"


#: Writes a cache of each profile; its records are random, and depend on the profile alone.
WRITE = """
import sys
from importlib import import_module
from pathlib import Path
root, module, *profiles = sys.argv[1:]
small = import_module(module)
for profile in profiles:
    codec = small.make_codec(profile)
    if getattr(codec, "clusters", 0):
        # Threshold as the version before writes it.
        codec = small.make_codec(profile, clusters=0, fitted=0)
    identity = small.make_identity(codec=codec)
    print(small.make_cache(Path(root), identity).name)
"""


def write_caches(root: Path, packages: Path, small: str) -> list[str]:
    """Write a cache of each profile with a version's packages; return the fingerprints.

    ``small`` is the module of that version that makes small caches.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", WRITE, str(root), small, *sorted(PROFILES)],
        env=os.environ | {"PYTHONPATH": str(packages)},
        cwd=root.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def test_caches_of_all_profiles_are_read_as_they_were(before: Path, tmp_path: Path) -> None:
    names = write_caches(tmp_path / "old", before, "cache.testing")
    assert names == write_caches(tmp_path / "new", ROOT, "bench.support.small.caches")
    for name in names:
        assert verify_cache(tmp_path / "old" / name) == []
        old, new = (open_cache(tmp_path / version / name) for version in ("old", "new"))
        assert old.identity == new.identity
        everything = range(len(old))
        (sequences, records), (others, their_records) = (
            each.read(everything) for each in (old, new)
        )
        assert np.array_equal(sequences.tokens, others.tokens)
        assert records.columns.keys() == their_records.columns.keys()
        for column, values in records.columns.items():
            assert np.array_equal(values, their_records[column]), (name, column)
