"""The whole OpenAPI document, fuzzed by schemathesis against a running API, with and without keys.

There must be no finding and no 5xx.

`make test FUZZ=1` runs the same with more examples: KD_FUZZ_EXAMPLES is their number for each
operation and phase.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from services.store.callers import Caller

EXAMPLES = int(os.environ.get("KD_FUZZ_EXAMPLES", "6"))
UNLIMITED = {
    "rate_post": 10**9,
    "rate_get": 10**9,
    "rate_validate": 10**9,
    "rate_sse": 10**6,
    "quota_open_jobs": 10**9,
    "quota_record_bytes": 10**12,
    "disk_floor_bytes": 0,
}


def some_jobs(parts: Parts, owner: Caller) -> list[str]:
    """Create a job in every status that needs no worker, and a trial of a search."""
    store = parts.jobs
    ids = [store.create(make_config("quick"), owner).id for _ in range(8)]
    store.create(make_config("quick", depends_on=[ids[7]]), owner)
    for outcome in ("succeeded", "failed"):
        claim = store.claim_next("train", "fuzz", 3600.0)
        assert claim is not None
        error = (
            {"type": "internal", "detail": "It broke.", "remedy": ""}
            if outcome == "failed"
            else None
        )
        store.finish(claim, outcome, error)  # type: ignore[arg-type]
    store.claim_next("train", "fuzz", 3600.0)
    store.change("cancel", ids[3])
    store.change("pause", ids[4])
    return ids


def fuzz(parts: Parts, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        "tests/support/schemathesis.toml",
        "run",
    ]
    options = [
        "--seed",
        "1",
        "--max-examples",
        str(EXAMPLES),
        "--continue-on-failure",
        "--no-color",
        *arguments,
    ]
    return subprocess.run(
        [*command, f"{parts.settings.server}/openapi.json", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


def require_clean(parts: Parts, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* (generated|test cases)", done.stdout), done.stdout[-2000:]
    logs = [
        log.read_text(errors="replace")
        for log in (parts.settings.home / "logs").glob("services.api-*.log")
    ]
    assert logs and not any("Traceback" in log for log in logs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_api_without_keys_matches_its_document(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(**UNLIMITED)
    parts.start_api()
    require_clean(parts, fuzz(parts, KD_TEST_JOBS=" ".join(some_jobs(parts, Caller("local")))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_api_with_keys_matches_its_document(
    new_parts: Callable[..., Parts], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "services.terminal.cli",
            "keys",
            "new",
            "fuzz",
            "--scopes",
            "read,write,admin",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"KD_API_KEYS_FILE": str(keys)},
    )
    key = re.search(r"kd_\S+", made.stdout)
    assert key is not None, made.stdout + made.stderr
    parts = new_parts(api_keys_file=keys, **UNLIMITED)
    parts.start_api()
    header = f"Authorization: Bearer {key[0]}"
    require_clean(
        parts,
        fuzz(parts, "--header", header, KD_TEST_JOBS=" ".join(some_jobs(parts, Caller("fuzz")))),
    )
