"""What a cache holds and who uses it, over HTTP, against real small caches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.harness import Parts, make_config
from bench.support.small.caches import (
    make_cache,
    make_codec,
    make_identity,
    make_shard,
    write_folders,
)
from bench.support.waiting import PATIENCE_SECONDS
from cache.inspection import compute_cache_stats
from cache.reading.usage import held
from cache.rounding import ENTROPY_STEP
from cache.shards.names import locate_seal, name_shard
from cache.store import open_cache
from cache.writing.writer import open_writer
from kd.client.wire.jobs import Job
from kd.config.jobfile import parse_config
from kd.files import write_json
from services.store.callers import Caller
from tests.support.services.api import client, inputs, problem, running, serving, tell, with_keys


@pytest.fixture
def api(serving_parts: Parts) -> Parts:
    serving_parts.jobs.redis.flushall()
    return serving_parts


def ask(api: Parts, folder: Path, path: str) -> httpx.Response:
    return api.http.get(f"/caches/{folder.name}/{path}", timeout=PATIENCE_SECONDS)


def show(api: Parts, folder: Path, path: str) -> dict[str, Any]:
    answer = ask(api, folder, path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(api: Parts, folder: Path, kind: str, *problems: str) -> Job:
    """Play a worker that checks a cache and finds these problems."""
    section = {"teacher": {"model": "t"}} if kind == "fidelity" else {}
    config = {"kind": kind, "name": kind, "cache": {"fingerprint": folder.name}, **section}
    created = api.jobs.create(parse_config(config))
    claim = api.jobs.claim(created.id, "precompute", "test", 600)
    assert claim is not None
    run = api.settings.run_dir(claim.id)
    run.mkdir(parents=True)
    write_json(run / f"{kind}.json", {"problems": list(problems)})
    error = {"type": "cache_corrupt", "detail": "It is damaged.", "remedy": ""}
    api.jobs.finish(claim, "failed" if problems else "succeeded", error if problems else None)
    job = api.jobs.get(claim.id)
    assert job is not None
    return job


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize("profile", ["threshold", "topk", "hidden"])
def test_histograms_of_a_small_cache_are_those_of_all_records(api: Parts, profile: str) -> None:
    folder = make_cache(api.settings.caches, make_identity(codec=make_codec(profile)))
    found = show(api, folder, "statistics")
    every = compute_cache_stats(open_cache(folder))
    assert (found["whole"], found["records"]) == (True, every.positions)
    assert (found["sequences"], found["sequences_read"], found["seed"]) == (10, 10, 0)
    assert found["entropy_of"] == ("sequences" if profile == "threshold" else "positions")
    assert tuple(found["entropy"]["counts"]) == every.entropy.counts
    assert tuple(found["kept_mass"]["counts"]) == every.kept_mass.counts
    assert sum(found["entries"]["counts"]) == every.positions
    assert every.entries is not None
    assert found["entry_counts"]["p99"] == every.entries.p99
    assert show(api, folder, "statistics?seed=7")["seed"] == 7
    problem(ask(api, folder, "statistics?seed=-1"), 422)


def test_a_damaged_cache_says_what_is_wrong(api: Parts) -> None:
    folder = make_cache(api.settings.caches, make_identity(train_sequences=8))
    (folder / locate_seal(name_shard(0))).unlink()
    assert "is missing" in problem(ask(api, folder, "statistics"), 409, "cache-corrupt").detail
    assert show(api, folder, "shards")["corrupt"] == [0]
    assert show(api, folder, "records?sequence=5")["records"], "the rest can be read"
    problem(ask(api, folder, "records?sequence=1"), 409, "cache-corrupt")
    make_cache(api.settings.caches, make_identity(train_sequences=8))
    assert show(api, folder, "statistics")["whole"], "it was captured again"


def test_a_cache_that_is_not_sealed_has_no_records_yet(api: Parts) -> None:
    folder = api.settings.caches / ("c" * 32)
    folder.mkdir(parents=True, exist_ok=True)
    for path in ("statistics", "records"):
        problem(ask(api, folder, path), 409, "cache-incomplete")
    problem(ask(api, folder.with_name("d" * 32), "statistics"), 404)


# ---------------------------------------------------------------------- shards


def test_shards_are_sealed_in_work_missing_or_corrupt(api: Parts) -> None:
    identity = make_identity(train_sequences=25)
    folder = make_cache(api.settings.caches, make_identity(train_sequences=29))
    states = show(api, folder, "shards")
    assert (states["cells"], states["shard_sequences"]) == ("0" * 8, 4)
    assert (states["complete"], states["measured"], states["verified_at"]) == (True, True, None)
    job = check(api, folder, "verify", f"{name_shard(3)}/entropy/c.0: content differs")
    states = show(api, folder, "shards")
    assert (states["cells"], states["counts"]["corrupt"]) == ("00030000", 1)
    assert states["verified_at"] is not None and job.finished_at is not None
    # A capture under way: its job tells how many shards there will be.
    claim = running(api)
    tell(api, claim, ("plan", {"fingerprint": identity.fingerprint}))
    with open_writer(api.settings.caches, identity) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(identity, 0))
        writer.begin_shard(1)
        states = show(api, writer.folder, "shards")
        assert (states["complete"], states["captured"], states["cells"]) == (False, True, "02")
        writer.clear_unfinished()
    assert show(api, writer.folder, "shards")["cells"] == "0"


def test_a_capture_tells_how_many_shards_there_will_be(api: Parts) -> None:
    identity = make_identity(train_sequences=37)
    created = api.jobs.create(make_config("capturing", "precompute", cache={"shard_sequences": 4}))
    claim = api.jobs.claim(created.id, "precompute", "test", 600)
    assert claim is not None
    progress = {"done": 4, "total": 40, "unit": "sequences"}
    tell(api, claim, ("plan", {"fingerprint": identity.fingerprint}), ("progress", progress))
    with open_writer(api.settings.caches, identity) as writer:
        write_folders(writer)
        writer.write_shard(0, *make_shard(identity, 0))
        assert show(api, writer.folder, "shards")["cells"] == "0111111111"


# ---------------------------------------------------------------------- records


def test_a_page_of_records_has_text_and_probabilities(api: Parts) -> None:
    folder = make_cache(api.settings.caches)
    page = show(api, folder, "records?sequence=2&start=3&limit=4")
    sequences, records = open_cache(folder).read([2])
    places = sequences.target_mask[0].nonzero()[0].tolist()
    assert (page["sequence"], page["sequences"], page["split"]) == (2, 10, "train")
    assert (page["start"], page["count"], len(page["records"])) == (3, len(places), 4)
    first = page["records"][0]
    tokens = sequences.tokens[0].tolist()
    assert first["position"] == places[3]
    assert first["said"] == f"token {tokens[places[3] + 1]}"
    assert first["entropy"] == records["entropy"][3] * ENTROPY_STEP
    assert first["said_id"] in [entry["id"] for entry in first["head"]]
    total = sum(entry["probability"] for entry in first["head"]) + first["tail"]
    assert total == pytest.approx(1, abs=0.02)
    assert page["text"][first["position"] - page["text_start"]] == first["token"]
    assert page["entropy_of"] == "sequences"
    assert any(record["tail_count"] for record in page["records"])
    for record in page["records"]:
        unit = record["tail"] / max(record["tail_count"], 1)
        others = [each for each in record["head"] if each["id"] != record["said_id"]]
        for entry in others if record["tail_count"] else ():
            count = entry["probability"] / unit
            assert count == pytest.approx(round(count), abs=1e-3) and round(count) >= 1


def test_a_page_tells_whether_a_record_has_its_own_entropy(api: Parts) -> None:
    for options in ({"entropies": True}, {"clusters": 0, "fitted": 0}):
        folder = make_cache(api.settings.caches, make_identity(codec=make_codec(**options)))
        assert show(api, folder, "records")["entropy_of"] == "positions"


def test_there_is_no_page_of_another_sequence(api: Parts) -> None:
    folder = make_cache(api.settings.caches)
    assert "it has 10" in problem(ask(api, folder, "records?sequence=10"), 404).detail
    problem(ask(api, folder, "records?sequence=-1"), 422)
    problem(ask(api, folder, "records?limit=257"), 422)
    assert show(api, folder, "records?start=999")["records"] == []


# ---------------------------------------------------------------------- who uses it


def test_usage_names_jobs_students_checks_and_what_holds_a_cache(api: Parts) -> None:
    folder = make_cache(api.settings.caches, make_identity(train_sequences=41))
    empty = show(api, folder, "usage")
    assert (empty["jobs"], empty["kept_by"], empty["verify"]) == ([], [], None)
    student = running(api, cache={"fingerprint": folder.name}, loss={"alpha": 0.5})
    tell(api, student, ("artifact", {"name": "student", "path": "/somewhere"}))
    found = show(api, folder, "usage")
    assert [job["id"] for job in found["jobs"]] == [student.id]
    assert found["kept_by"] == [
        f"the job {student.id}, which has not ended",
        f"the student of {student.id}",
    ]
    api.jobs.finish(student, "succeeded")
    with held(folder):
        lines = [f"the student of {student.id}", "a process that reads it now"]
        assert show(api, folder, "usage")["kept_by"] == lines
    assert show(api, folder, "usage")["last_used"] is not None
    bad = check(api, folder, "verify", "shards/000000/entropy/c.0: missing")
    verify = show(api, folder, "usage")["verify"]
    assert (verify["job"], verify["status"], verify["outdated"]) == (bad.id, "failed", False)
    assert verify["problems"] == ["shards/000000/entropy/c.0: missing"]
    good = check(api, folder, "verify")
    fidelity = check(api, folder, "fidelity", "kept_error at temperature 1 is 3")
    found = show(api, folder, "usage")
    assert (found["verify"]["job"], found["verify"]["problems"]) == (good.id, [])
    assert found["fidelity"]["problems"] == ["kept_error at temperature 1 is 3"]
    assert {job["id"] for job in found["jobs"]} == {student.id, bad.id, good.id, fidelity.id}
    later = (folder / "manifest.json").stat().st_mtime + 3600
    os.utime(folder / "manifest.json", (later, later))
    assert show(api, folder, "usage")["verify"]["outdated"] is True
    assert show(api, folder, "shards")["counts"]["corrupt"] == 0


def test_a_student_of_kd_run_holds_a_cache_too(api: Parts) -> None:
    folder = make_cache(api.settings.caches, make_identity(train_sequences=45))
    run = api.settings.runs / "by-hand" / "student"
    run.mkdir(parents=True)
    (run / "distillation.json").write_text(json.dumps({"cache": folder.name}))
    assert show(api, folder, "usage")["kept_by"] == ["the student of by-hand"]


@pytest.mark.usefixtures("_server_binary")
def test_a_caller_sees_the_jobs_of_its_own_key(tmp_path: Path) -> None:
    file, keys = with_keys(tmp_path, one="write", two="write")
    with serving(tmp_path / "service", api_keys_file=file) as parts:
        folder = make_cache(parts.settings.caches)
        body: dict[str, Any] = {"loss": {"alpha": 0.5}, "cache": {"fingerprint": folder.name}}
        mine, theirs = (running(parts, Caller(name), **body) for name in ("one", "two"))
        with client(parts, keys["one"]) as http:
            found = http.get(f"/caches/{folder.name}/usage").json()
            assert [job["id"] for job in found["jobs"]] == [mine.id]
            assert theirs.id not in json.dumps(found)
            hidden = make_cache(parts.settings.caches, make_identity(train_sequences=9))
            for path in ("usage", "records", "shards", "statistics"):
                problem(http.get(f"/caches/{hidden.name}/{path}"), 404)


# ---------------------------------------------------------------------- fidelity


def test_fidelity_is_a_job_with_the_teacher_of_the_cache(api: Parts) -> None:
    place = inputs(api.settings.home / "inputs")
    folder = make_cache(api.settings.caches, make_identity(train_sequences=12), place)
    path = f"/caches/{folder.name}/fidelity"
    answer = api.http.post(path, headers={"Idempotency-Key": "f"}, timeout=PATIENCE_SECONDS)
    job = answer.json()
    assert (answer.status_code, job["kind"], job["stage"]) == (202, "fidelity", "precompute")
    assert (job["config"]["teacher"]["model"], job["config"]["teacher"]["gguf_file"]) == (
        place,
        None,
    )
    assert job["config"]["cache"]["fingerprint"] == folder.name
    again = api.http.post(path, headers={"Idempotency-Key": "f"}, timeout=PATIENCE_SECONDS)
    assert again.json()["id"] == job["id"]


def test_fidelity_is_refused_without_a_teacher_or_a_manifest(api: Parts) -> None:
    for sequences, name in ((13, "/nowhere/teacher"), (14, "/nowhere/teacher/tiny.gguf")):
        folder = make_cache(api.settings.caches, make_identity(train_sequences=sequences), name)
        answer = api.http.post(f"/caches/{folder.name}/fidelity", timeout=PATIENCE_SECONDS)
        assert "/nowhere/teacher'" in str(problem(answer, 422).errors)
    (api.settings.caches / ("d" * 32)).mkdir(exist_ok=True)
    problem(api.http.post(f"/caches/{'d' * 32}/fidelity"), 409, "not-sealed")


# ---------------------------------------------------------------------- the process


def test_the_api_process_imports_neither_torch_nor_zarr_for_a_look(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "caches")
    program = """
import json, sys
from pathlib import Path
from services.api.reading.process import ReadingProcess
from services.settings import Settings

reading = ReadingProcess(Settings(redis_url="redis://127.0.0.1:1/0", home=Path(sys.argv[1])))
folder = Path(sys.argv[2])
records = reading.read("statistics", folder, seed=0)["records"]
asked = {"sequence": 0, "start": 0, "limit": 5}
shown = len(reading.read("records", folder, **asked)["records"])
reading.close()
print(json.dumps([[records, shown], sorted({"torch", "zarr", "numcodecs"} & {*sys.modules})]))
"""
    command = [sys.executable, "-c", program, str(tmp_path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (records, shown), heavy = json.loads(done.stdout.splitlines()[-1])
    assert (records > 0, shown, heavy) == (True, 5, [])


def find_reader(api: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == api and b"services.api.reading.child" in command:
            return int(entry.name)
    raise AssertionError("the API has no such process")


@pytest.mark.usefixtures("_server_binary")
def test_a_look_that_hangs_is_given_up_and_holds_up_nothing(tmp_path: Path) -> None:
    inputs(tmp_path / "inputs")
    parts = Parts(tmp_path, plan_seconds=6, rate_get=10**6)
    try:
        api = parts.start_api().pid
        folder = make_cache(parts.settings.caches)
        assert show(parts, folder, "statistics")["whole"]
        first = find_reader(api)
        os.kill(first, signal.SIGSTOP)
        answer = ask(parts, folder, "records")
        assert "more than 6 s" in problem(answer, 503, "reading-limit").detail
        assert answer.headers["retry-after"]
        assert show(parts, folder, "records")["records"]
        assert find_reader(api) != first
    finally:
        parts.close()
