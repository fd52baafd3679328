"""Commands on a cache in a bucket print and write what they do for the same cache in a folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.stores.proxy import Proxy
from bench.stores.server import KEYS, Server
from bench.support.paths import ROOT
from cache.remote.address import StoreAddress
from cache.remote.bucket import Bucket
from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.files import find_caches
from kd.pipeline import run_stage
from services.terminal.exit_codes import FAILED, INVALID
from tests.support.commands import kd

TOKENIZER = ROOT / "examples" / "austen" / "teacher"


class Twins:
    """One cache, in the folder of a data folder and in a bucket that another one mirrors."""

    def __init__(self, address: str, folder: Path, fingerprint: str) -> None:
        self.address = address
        self.folder = folder
        self.fingerprint = fingerprint

    def run(self, *words: object) -> tuple[Any, Any]:
        """Run a command on both; {out} in a word is a place of its own for each."""
        done = [self._run(name, store, words) for name, store in self.places.items()]
        for each in done:
            assert each.returncode == 0, each.stderr
            assert not any(secret in each.stdout + each.stderr for secret in KEYS.values())
        plain, far = (json.loads(each.stdout) for each in done)
        return plain, far

    @property
    def places(self) -> dict[str, dict[str, str]]:
        return {"plain": {}, "far": {"KD_STORE": self.address}}

    def _run(
        self, name: str, store: dict[str, str], words: tuple[object, ...]
    ) -> subprocess.CompletedProcess[str]:
        arguments = [str(each).replace("{out}", str(self.folder / f"out-{name}")) for each in words]
        return kd("cache", *arguments, "--json", KD_HOME=str(self.folder / name), **store)

    def read_manifests(self) -> tuple[bytes, bytes]:
        bucket = Bucket(StoreAddress.parse(self.address))
        plain = self.folder / "plain" / "caches" / self.fingerprint / "manifest.json"
        return plain.read_bytes(), bucket.get(f"{self.fingerprint}/manifest.json")


@pytest.fixture
def twins(
    address: str, tiny_teacher: Path, tiny_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Twins:  # fmt: skip
    """Both are captured, each by itself; the mirror of the bucket is empty."""
    monkeypatch.setenv("KD_DOWNLOADS", "")
    config = parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(tiny_teacher), "batch_size": 4},
            "data": {
                "train": str(tiny_text), "validation_fraction": 0.1, "sequence_length": 32,
                "max_train_samples": 20, "max_eval_samples": 4,
            },
            "cache": {"shard_sequences": 8},
        }
    )  # fmt: skip
    for name, store in (("plain", None), ("elsewhere", address)):
        home = tmp_path / name
        cache = config.cache.model_copy(update={"store": store})
        found = run_stage(
            "precompute", config.model_copy(update={"cache": cache}), home, home / "runs" / "x"
        )
    return Twins(address, tmp_path, found.cache["fingerprint"])


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_fidelity_and_stats_of_a_bucket_are_those_of_a_folder(twins: Twins) -> None:
    for command in ("stats", "info"):
        plain, far = twins.run(command, twins.fingerprint[:8])
        _drop_places(plain, far)
        assert plain == far, command
    plain, far = twins.run("fidelity", twins.fingerprint[:8], "--positions", 16)
    assert plain["written"]
    assert far["written"]
    assert plain["fidelity"] == far["fidelity"]
    # Both were captured, and measured, by the same bytes; they differ in when and how fast.
    ours, theirs = (json.loads(each) for each in twins.read_manifests())
    assert ours["fidelity"] == theirs["fidelity"]
    assert ours["fidelity"]
    assert twins.run("verify", twins.fingerprint[:8])[1]


def _drop_places(*found: dict[str, Any]) -> None:
    """Take out the place and the time of a cache, and the run, which is on one disk alone."""
    for each in found:
        for name in ("path", "created", "text", "made_by"):
            each.pop(name, None)


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.long
@pytest.mark.parametrize("format", ["parquet", "distillkit"])
def test_an_export_of_a_bucket_has_the_bytes_of_one_of_a_folder(twins: Twins, format: str) -> None:
    words = ("export", twins.fingerprint, "--format", format, "--out", "{out}", "--lossy")
    twins.run(*words)
    plain, far = (read_files(twins.folder / f"out-{name}") for name in twins.places)
    assert plain == far
    assert plain


@pytest.mark.long
def test_records_of_another_tool_are_imported_into_a_bucket(address: str, tmp_path: Path) -> None:
    items = [None, {"6": {"logprob": -0.25, "rank": 1}}, {"7": {"logprob": -4.0, "rank": 5}}]
    row = {"prompt_token_ids": [5, 6, 7], "prompt_logprobs": items}
    answers = tmp_path / "answers.jsonl"
    answers.write_text((json.dumps(row) + "\n") * 4)
    words = ("cache", "import", "vllm", answers, "--tokenizer", TOKENIZER, "--json")
    summaries = {}
    for name, store in (("plain", {}), ("far", {"KD_STORE": address})):
        done = kd(*words, KD_HOME=str(tmp_path / name), **store)
        assert done.returncode == 0, done.stderr
        summaries[name] = json.loads(done.stdout)
    fingerprint = summaries["plain"]["fingerprint"]
    assert summaries["far"]["fingerprint"] == fingerprint
    plain = open_cache(tmp_path / "plain" / "caches" / fingerprint)
    far = open_cache(find_caches(tmp_path / "reader", address) / fingerprint)
    assert plain.manifest.shards == far.manifest.shards
    for ours, theirs in zip(plain.read(range(4)), far.read(range(4)), strict=True):
        assert str(ours) == str(theirs)


# ---------------------------------------------------------------------- what a user sees


REFUSALS = {
    "region": ("the region 'us-east-1' is wrong; expecting 'eu-central-1'", "Set AWS_REGION"),
    "moved": ("an incorrectly configured region", "Set AWS_REGION"),
    "expired": ("403 ExpiredToken: The provided token has expired.", "renew them, then run again"),
    "unknown": ("403 InvalidAccessKeyId", "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "denied": ("403 AccessDenied", "Let this key get, put, list and delete objects"),
}


@pytest.fixture
def job_file(address: str, tmp_path: Path) -> Path:
    job = {
        "teacher": {"model": f"{address}/model"},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {"train": f"{address}/text.txt"},
        "train": {"max_steps": 1},
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    return file


@pytest.mark.long
@pytest.mark.parametrize("fault", REFUSALS)
def test_a_bucket_that_refuses_says_why_and_what_to_do(
    address: str,
    s3_server: Server,
    reach: Callable[[int], None],
    job_file: Path,
    tmp_path: Path,
    fault: str,
) -> None:
    reason, remedy = REFUSALS[fault]
    region = "eu-central-1" if fault == "region" else ""
    proxy = Proxy(s3_server.port, lambda *_: "" if region else fault, region)
    with proxy.running():
        reach(proxy.port)
        place = {"KD_HOME": str(tmp_path / "home"), "KD_STORE": address}
        for words in (("store", "check", address), ("cache", "ls"), ("validate", job_file)):
            done = kd(*words, **place)
            code = INVALID if words[0] == "validate" else FAILED
            shown = " ".join((done.stdout + done.stderr).split())
            assert done.returncode == code, shown
            assert reason in shown, words
            assert remedy in shown, words
            assert "Traceback" not in shown
            assert not any(secret in shown for secret in KEYS.values())
        if region:
            right = kd("store", "check", address, AWS_REGION=region)
            assert right.returncode == 0, right.stderr
