"""A job with several teachers: a cache for each, one student, and a report by domain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache.store import open_cache
from kd.capture.estimate.job import estimate_by_table
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Interrupted, TrainingError
from kd.files import read_json
from kd.overfit_check import check_overfitting
from kd.pipeline import run_stages
from kd.preflight.named_paths import list_named_resources
from kd.preflight.problems import Folders, find_problems
from kd.progress import Event, Monitor
from kd.stages.capture import run_precompute
from kd.tracking.metrics import read_metrics
from services.store.jobs.records import make_job_id
from services.store.run_folder import read_run
from tests.support.kd.teachers.several import make_other_teacher, make_several_job, write_texts


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
    # The list before it ends with the checks.
    assert page.index("- Checks passed") < page.index("## By domain") < page.index("| math |")


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


def test_problems_stand_at_the_places_of_the_whole_job(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    job = make_several_job(teachers, [{"path": "gone.txt", "teacher": "math"}, *route(texts)])
    job["teachers"]["code"]["model"] = str(tmp_path / "nowhere")
    found = find_problems(parse_config(job), Folders(Path(), tmp_path, opened=True))
    pointers = [problem.pointer for problem in found]
    assert pointers == ["/teachers/code/model", "/data/train/0"]


@pytest.mark.usefixtures("one_thread")
def test_a_mixture_of_two_tokenizers_is_refused_before_any_capture(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "strange"
    shutil.copytree(teachers["code"], folder)
    rules = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = rules["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(rules), encoding="utf-8")
    mixture = [{"path": str(texts["math"]), "mixture": {"math": 0.5, "code": 0.5}}]
    job = make_several_job(teachers | {"code": folder}, mixture) | {"kind": "precompute"}
    del job["student"], job["train"]
    with pytest.raises(ConfigError, match="Give a mixture only teachers of one tokenizer"):
        run(job, tmp_path)
    assert not list((tmp_path / "caches").glob("*/"))


@pytest.mark.usefixtures("one_thread")
def test_a_training_goes_on_from_its_checkpoint_and_refuses_another_balance(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    job = make_several_job(teachers, route(texts), train={"dropout": 0.1})
    _, whole = run(job, tmp_path, "whole")
    stops: list[int] = []

    def stop() -> bool:
        return bool(stops)

    def listen(event: Event) -> None:
        if event.type == "metrics" and event.data["step"] == 3:
            stops.append(3)

    folder = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        run_stages(parse_config(job), tmp_path, folder, Monitor(listen, stop))
    with pytest.raises(TrainingError, match=r"loss\.balance"):
        run(job | {"loss": {"balance": "domains"}}, tmp_path, "stopped")
    run(job, tmp_path, "stopped")
    weights = [(each / "student" / "model.safetensors").read_bytes() for each in (whole, folder)]
    assert weights[0] == weights[1]


def test_what_is_of_one_teacher_refuses_several(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    config = parse_config(make_several_job(teachers, route(texts)))
    with pytest.raises(ConfigError, match="an estimate is of one teacher"):
        estimate_by_table(config, Path(), tmp_path)
    with pytest.raises(ConfigError, match="a check is of one teacher"):
        check_overfitting(config, tmp_path)
    named = {each.pointer: each.kind for each in list_named_resources(config)}
    assert named["/teachers/math/model"] == named["/teachers/code/model"] == "model"
    assert named["/data/train/0/path"] == named["/data/train/1/path"] == "text"


@pytest.mark.usefixtures("one_thread")
def test_a_run_folder_tells_all_caches(
    teachers: dict[str, Path], texts: dict[str, Path], tmp_path: Path
) -> None:
    job = make_several_job(teachers, route(texts)) | {"kind": "precompute"}
    _, folder = run(job, tmp_path, make_job_id())
    found = read_run(folder)
    assert found.fingerprints == read_json(folder / "cache.json")["fingerprints"]
    assert found.fingerprint == found.fingerprints[0] and found.error is None
    assert {each.parent.name for each in folder.glob("captures/*/cache.json")} == {
        *found.fingerprints
    }


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_two_processes_take_the_steps_of_one(
    teachers: dict[str, Path],
    texts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Domains keep their weights, whichever process has which sequences."""
    monkeypatch.setenv("KD_DEVICES", "cpu,cpu")
    mixed = {"path": str(texts["code"]), "mixture": {"math": 0.5, "code": 0.5}}
    sources = [{"path": str(texts["math"]), "teacher": "math"}, mixed]
    found = []
    for gpus in (1, 2):
        job = make_several_job(
            teachers,
            sources,
            loss={"balance": "domains"},
            train={"max_steps": 3, "batch_size": 4, "precision": "fp32"},
            resources={"gpus": gpus},
        )
        _, folder = run(job, tmp_path, f"run {gpus}")
        lines = read_metrics(folder / "metrics.jsonl")
        found.append([(x["loss"], x["grad_norm"]) for x in lines if x["type"] == "metrics"])
    assert len(found[0]) == 3
    assert found[0] == [pytest.approx(each, rel=1e-6) for each in found[1]]
