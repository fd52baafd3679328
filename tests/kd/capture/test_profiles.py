"""Whole jobs with every profile, with a remote teacher, and with imported caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache.checking.verify import verify_cache
from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.exchange.exporting import export_records
from kd.exchange.importing import ImportRequest, import_records
from kd.pipeline import run_stages
from kd.progress import StageResult
from tests.support.remote_server import RemoteServer

pytestmark = pytest.mark.usefixtures("one_thread")

PROFILES = [
    ({"threshold": 0.1, "always_keep": [0, 5]}, 1.0),
    ({"profile": "tempered", "temperatures": {"min": 1.0, "max": 3.0}, "draws": 2}, 2.5),
    ({"profile": "topk", "k": 12}, 1.0),
    ({"profile": "dense"}, 0.5),
    ({"profile": "dense", "dtype": "float32"}, 2.0),
    ({"profile": "hidden"}, 4.0),
    ({"profile": "hidden", "dtype": "int8"}, 1.0),
]


def make_job(
    teacher: dict[str, Any], text: Path, section: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    return {
        "name": "whole",
        "teacher": teacher,
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(text),
            "sequence_length": 32,
            "max_train_samples": 12,
            "max_eval_samples": 4,
        },
        "cache": section | {"shard_sequences": 8},
        "train": {
            "epochs": 3,
            "batch_size": 4,
            "eval_steps": 3,
            "save_steps": 3,
            "learning_rate": 1e-2,
        },
        **changes,
    }


def run(job: dict[str, Any], home: Path, name: str = "x") -> StageResult:
    return run_stages(parse_config(job), home, home / "runs" / name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "temperature"), PROFILES, ids=[str(section) for section, _ in PROFILES]
)
def test_a_student_learns_from_every_profile(
    section: dict[str, Any], temperature: float, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    loss = {"alpha": 0.1, "temperature": temperature}
    report = run(
        make_job({"model": str(tiny_teacher)}, tiny_text, section, loss=loss), tmp_path
    ).report
    folder = tmp_path / "caches" / report["fingerprint"]
    assert verify_cache(folder) == []
    rows = open_cache(folder).manifest.fidelity
    assert rows and all(row.positions > 0 for row in rows), (
        "every capture is compared with the teacher"
    )
    assert report["student_perplexity"] < report["student_perplexity_before"]
    assert report["temperature"] == temperature and report["validation_kl"] > 0
    assert report["teacher_perplexity"] > 1 and 0 <= report["validation_agreement"] <= 1


@pytest.mark.long
def test_a_student_learns_from_a_server(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """The same text and k give the same records through a server and here, up to the rounding of
    JSON.
    """
    with RemoteServer(tiny_teacher, 2048) as server:
        remote = {
            "backend": "http",
            "model": "teacher",
            "url": server.url,
            "tokenizer": str(tiny_teacher),
        }
        far = run(
            make_job(remote, tiny_text, {"profile": "topk", "k": 12}), tmp_path / "far"
        ).report
    near = run(
        make_job({"model": str(tiny_teacher)}, tiny_text, {"profile": "topk", "k": 12}),
        tmp_path / "near",
    ).report
    assert far["fingerprint"] != near["fingerprint"]
    assert far["student_perplexity"] == pytest.approx(near["student_perplexity"], rel=1e-2)
    assert far["teacher_perplexity"] == pytest.approx(near["teacher_perplexity"], rel=1e-2)
    assert "teacher_entropy" in near and "teacher_entropy" not in far, "a server does not say it"


@pytest.mark.long
def test_a_student_learns_from_an_imported_cache(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """A cache that went to Parquet and back teaches the same as the captured one."""
    captured = run(
        make_job({"model": str(tiny_teacher)}, tiny_text, {"profile": "topk", "k": 12}), tmp_path
    ).report
    store = open_cache(tmp_path / "caches" / captured["fingerprint"])
    export_records(store, "parquet", tmp_path / "records", 12)
    files = tuple(sorted((tmp_path / "records").glob("*.parquet")))
    imported = import_records(
        ImportRequest("parquet", files, tiny_teacher, k=12, teacher_name="elsewhere"),
        tmp_path / "caches",
    )
    student = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(tiny_teacher)}}
    job = make_job(
        {}, tiny_text, {"fingerprint": imported["fingerprint"]}, kind="train", student=student
    )
    del job["teacher"], job["data"], job["cache"]["shard_sequences"]
    report = run(job, tmp_path, "imported").report
    assert report["teacher"] == "elsewhere" and report["fingerprint"] == imported["fingerprint"]
    assert report["student_perplexity"] == pytest.approx(captured["student_perplexity"], rel=1e-3)

    with pytest.raises(ConfigError, match="temperature 1 only"):
        run(job | {"loss": {"temperature": 2.0}}, tmp_path, "hot")
    with pytest.raises(ConfigError, match="no sealed cache"):
        run(job | {"cache": {"fingerprint": "0" * 32}}, tmp_path, "none")
