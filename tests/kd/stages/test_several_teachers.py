"""A job with several teachers: a cache for each, one student, and a report by domain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.pipeline import run_stages
from kd.progress import Event, Monitor
from kd.stages.capture import run_precompute
from tests.support.kd.several import make_other_teacher, make_several_job, write_texts


@pytest.fixture(scope="module")
def teachers(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return {"math": tiny_teacher, "code": make_other_teacher(tiny_teacher, folder / "code")}


@pytest.fixture(scope="module")
def texts(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_texts(tiny_text, tmp_path_factory.mktemp("texts"))


def route(texts: dict[str, Path]) -> list[dict[str, Any]]:
    return [{"path": str(path), "teacher": name} for name, path in texts.items()]


def run(job: dict[str, Any], home: Path, name: str = "run") -> tuple[list[Event], Path]:
    events: list[Event] = []
    run_stages(parse_config(job), home, home / name, Monitor(events.append))
    return events, home / name


@pytest.mark.usefixtures("one_thread")
def test_each_cache_is_that_of_a_job_with_its_teacher_alone(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    job = make_several_job(teachers, route(texts), loss={"balance": "domains"})
    events, folder = run(job, tmp_path)
    names = read_json(folder / "cache.json")["fingerprints"]
    assert len(set(names)) == 2
    alone = []
    for name in ("code", "math"):
        lone = {key: value for key, value in job.items() if key not in ("teachers", "loss")}
        lone |= {"kind": "precompute", "teacher": job["teachers"][name]}
        lone["data"] = job["data"] | {"train": [str(texts[name])]}
        made = run_precompute(parse_config(lone), tmp_path, tmp_path / name, Monitor())
        assert made.cache["reused"]
        alone.append(made.cache["fingerprint"])
    assert names == alone
    plans = [event.data for event in events if event.type == "plan"]
    assert plans[0] == {"fingerprint": names[0], "fingerprints": names}
    report = read_json(folder / "report.json")
    assert report["domains"].keys() == {"math", "code"}
    kl = sum(each["kl"] * each["tokens"] for each in report["domains"].values())
    assert kl / report["held_out_tokens"] == pytest.approx(report["validation_kl"], rel=1e-9)
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert "## By domain" in page and "| math |" in page


@pytest.mark.usefixtures("one_thread")
def test_the_order_of_teachers_and_sources_does_not_matter(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    mixed = [{"path": str(texts["math"]), "mixture": {"math": 0.25, "code": 0.75}}]
    sources = [*mixed, {"path": str(texts["code"]), "teacher": "code"}]
    _, one = run(make_several_job(teachers, sources), tmp_path, "one")
    turned = dict(reversed(teachers.items()))
    job = make_several_job(turned, sources[::-1])
    job["student"] = make_several_job(teachers, sources)["student"]
    _, other = run(job, tmp_path, "other")
    caches = [read_json(folder / "cache.json") for folder in (one, other)]
    assert caches[0]["join"] == caches[1]["join"]
    assert caches[0]["fingerprints"] == caches[1]["fingerprints"]
    weights = [(folder / "student" / "model.safetensors").read_bytes() for folder in (one, other)]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("profile", ["dense", "hidden", "topk", "tempered"])
def test_every_profile_trains_by_sources(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path, profile: str
) -> None:
    job = make_several_job(teachers, route(texts), cache={"profile": profile, "shard_sequences": 4})
    _, folder = run(job, tmp_path)
    checks = read_json(folder / "report.json")["checks"]
    assert [each["ok"] for each in checks if each["check"] == "parity"] == [True]
    assert open_cache(tmp_path / "caches" / read_json(folder / "cache.json")["fingerprints"][1])
