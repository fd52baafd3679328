"""A cache of profile threshold keeps the entropies of positions for jobs that weigh by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cache.store import open_cache
from kd.capture.plan import plan_capture
from kd.config.jobfile import load_config, parse_config
from kd.pipeline import run_stages
from kd.progress import SILENT
from tests.support.kd.tiny import make_tiny_job

pytestmark = pytest.mark.usefixtures("one_thread")
Job = dict[str, Any]


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    """A job as a file of version 0.2.0 may have it."""
    cache = {"profile": "threshold", "threshold": 0.04, "draws": 1}
    return make_tiny_job(tiny_teacher, tiny_text, cache=cache, loss={"entropy_weighting": 1.0})


def identify(job: Job, **changes: Any) -> str:
    return plan_capture(parse_config(job | changes)).identity.fingerprint


def test_a_job_file_of_version_0_2_0_that_weighs_positions_trains(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    result = run_stages(load_config(file), tmp_path, tmp_path / "runs" / "x", SILENT)
    assert result.report is not None and result.report["steps"] == 6
    store = open_cache(tmp_path / "caches" / result.cache["fingerprint"])
    assert store.codec.entropies and store.codec.entropy_of == "positions"
    _, records = store.read(np.arange(1))
    assert len(np.unique(records["entropy"])) > 2, "a mean has two neighbouring codes at most"

    # The same cache serves other weights, captures alone, and searches.
    space = {"search": {"space": {"loss.entropy_weighting": {"choices": [0.0, 1.0]}}}}
    known = store.identity.fingerprint
    assert identify(job, loss={"entropy_weighting": -2.0}) == known
    assert identify(job, kind="precompute") == known
    assert identify(job, kind="search", loss={}, **space) == known
    assert identify(job, loss={}) != known
    assert identify(job, loss={"entropy_weighting": 1.0, "alpha": 1.0}) == identify(job, loss={})


def test_other_profiles_have_one_cache_for_all_weights(job: Job) -> None:
    job = job | {"cache": {"profile": "topk"}}
    assert identify(job) == identify(job, loss={})
