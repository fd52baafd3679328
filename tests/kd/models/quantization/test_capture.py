"""A capture with a quantised teacher: its records, their fidelity, and where it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.store import Cache, open_cache
from kd.capture.capturing import summarise_cache
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.fidelity.measure import measure_fidelity
from kd.capture.fidelity.verdict import find_out_of_bounds
from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from tests.support.kd.captures import live
from tests.support.kd.quantizers import needs_torchao

pytestmark = [needs_torchao, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def store(tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A cache of a teacher with weights in int8, whose fidelity was checked."""
    home = tmp_path_factory.mktemp("home")
    job = {
        "kind": "precompute",
        "teacher": {"model": str(tiny_teacher), "quantization": "int8"},
        "data": {"train": str(tiny_text), "sequence_length": 64, "max_train_samples": 12},
        "cache": {"profile": "topk", "k": 32},
    }
    found = run_precompute(parse_config(job), home, home / "run", SILENT).cache
    return open_cache(home / "caches" / str(found["fingerprint"]))


def test_the_records_are_those_of_the_rounded_weights(store: Cache, tiny_teacher: Path) -> None:
    config = TeacherConfig(model=str(tiny_teacher), quantization="int8")
    model = load_teacher(TeacherFiles(config, tiny_teacher), torch.device("cpu"))
    rounded = LiveTeacher(model, find_lm_head(model, 2048))
    (row,) = measure_fidelity(store, rounded, positions=500).rows
    (plain,) = measure_fidelity(store, live(tiny_teacher), positions=500).rows
    assert row.kl is not None and plain.kl is not None
    assert row.kl < 1e-6 < plain.kl / 10
    assert find_out_of_bounds(store, measure_fidelity(store, rounded)) == []


def test_fidelity_loads_the_teacher_as_it_was_captured(store: Cache, tiny_teacher: Path) -> None:
    asked = TeacherFiles(TeacherConfig(model=str(tiny_teacher)), tiny_teacher)
    found = measure_fidelity(store, LiveTeacher.load(store.identity, asked))
    assert found.rows == store.manifest.fidelity


def test_the_quantisation_is_told(store: Cache) -> None:
    assert store.identity.teacher.quantization == "int8"
    assert summarise_cache(store, reused=True)["teacher_quantization"] == "int8"
