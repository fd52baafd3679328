"""The commands ``kd jobs`` with a real API and a key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.client.client import Client
from kd.client.errors import Refused, Unreachable
from kd.client.wire.service import WorkerState
from services.store.callers import Caller
from services.terminal.client import find_job
from tests.support.commands import kd
from tests.support.services.api import running, serving, tell, with_keys

ALICE = Caller("alice")


@dataclass
class Shell:
    parts: Parts
    key: str

    def kd(self, *words: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
        there = {"KD_SERVER": self.parts.settings.server, "KD_API_KEY": key or self.key}
        return kd(*words, **there)

    def ok(self, *words: str) -> str:
        done = self.kd(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shell(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    file, keys = with_keys(tmp_path_factory.mktemp("keys"), alice="write")
    with serving(tmp_path_factory.mktemp("api"), api_keys_file=file) as parts:
        yield Shell(parts, keys["alice"])


def test_the_key_is_sent_and_a_wrong_one_is_reported(shell: Shell) -> None:
    assert shell.ok("jobs", "ls") != ""
    wrong = shell.kd("jobs", "ls", key="kd_wrong")
    assert wrong.returncode == 1
    assert "KD_API_KEY" in wrong.stderr
    assert "kd_wrong" not in wrong.stderr + wrong.stdout


def test_a_job_is_paused_resumed_cancelled_retried_and_deleted(shell: Shell) -> None:
    job_id = shell.parts.jobs.create(make_config("quick"), ALICE).id
    for action, status in (
        ("pause", "paused"),
        ("resume", "queued"),
        ("cancel", "cancelled"),
        ("retry", "queued"),
        ("cancel", "cancelled"),
    ):
        assert shell.ok("jobs", action, job_id).strip() == f"{job_id}: {status}"
    refused = shell.kd("jobs", "pause", job_id)
    assert refused.returncode == 1
    assert "while the job is cancelled" in refused.stderr
    assert "delete, retry" in refused.stderr
    assert shell.ok("jobs", "rm", job_id, "--artifacts").strip() == f"{job_id}: deleted"
    assert "no job" in shell.kd("jobs", "show", job_id).stderr
    other = shell.parts.jobs.create(make_config("quick"), ALICE).id
    shell.ok("jobs", "cancel", other)
    assert json.loads(shell.ok("jobs", "rm", other, "--json")) == [{"id": other, "deleted": True}]


@pytest.mark.long
def test_two_jobs_are_compared_by_what_differs(shell: Shell) -> None:
    rates = (1e-3, 3e-3)
    jobs = [
        shell.parts.jobs.create(
            make_config(f"rate-{place}", train={"max_steps": 1, "learning_rate": rate}), ALICE
        ).id
        for place, rate in enumerate(rates)
    ]
    found = json.loads(shell.ok("jobs", "diff", *jobs, "--json"))
    assert found["jobs"] == jobs
    assert found["settings"] == {"train.learning_rate": list(rates)}
    assert found["results"]["status"] == ["queued", "queued"]
    shown = shell.ok("jobs", "diff", *jobs)
    assert re.search(r"train\.learning_rate +0\.001 +0\.003", shown)
    assert "rate-0" in shown.splitlines()[0]
    same = shell.kd("jobs", "diff", jobs[0], jobs[0])
    assert "same settings" in same.stderr
    shell.ok("jobs", "cancel", jobs[0])
    shell.ok("jobs", "cancel", jobs[1])


def test_jobs_are_compared_by_the_held_out_text_and_not_by_the_training_text(shell: Shell) -> None:
    claims = [running(shell.parts, ALICE), running(shell.parts, ALICE)]
    for claim, (perplexity, tokens) in zip(claims, ((35.9, 640), (20.0, 900)), strict=True):
        tell(
            shell.parts, claim,
            ("metrics", {"step": 5, "train_perplexity": 7.0}),
            ("evaluation", {"step": 5, "validation_perplexity": perplexity + 1}),
            ("report", {"student_perplexity": perplexity, "student_bits_per_byte": 1.25,
                        "held_out_tokens": tokens, "held_out_bytes": 3000}),
        )  # fmt: skip
    ids = [claim.id for claim in claims]
    found = json.loads(shell.ok("jobs", "diff", *ids, "--json"))["results"]
    assert found["perplexity"] == [35.9, 20.0]
    assert found["bits per byte"] == [1.25, 1.25]
    assert "not comparable" in shell.kd("jobs", "diff", *ids).stderr
    assert "not comparable" not in shell.kd("jobs", "diff", ids[0], ids[0]).stderr
    for claim in claims:
        shell.parts.jobs.finish(claim, "succeeded")


def test_the_address_of_a_page_is_printed(shell: Shell) -> None:
    job_id = shell.parts.jobs.create(make_config("quick"), ALICE).id
    there = {"KD_SERVER": shell.parts.settings.server, "KD_API_KEY": shell.key}
    opened = kd("open", job_id, **there, BROWSER="true")
    assert opened.returncode == 0, opened.stderr
    assert opened.stdout.strip() == f"{shell.parts.settings.server}/jobs/{job_id}"
    shell.ok("jobs", "cancel", job_id)


def test_a_job_that_no_worker_could_run_says_so_once(shell: Shell) -> None:
    job_id = shell.parts.jobs.create(make_config("quick", resources={"gpus": 1}), ALICE).id
    for action in ("pause", "resume"):
        shell.parts.jobs.change(action, job_id)
    shell.parts.jobs.show_worker(WorkerState(id="cpu:1", stages=["train"]), 600)
    why = "No worker of stage train has 1 GPU; the job waits until one starts that has."
    assert re.search(rf"^reason +{why}$", shell.ok("jobs", "show", job_id), re.MULTILINE)

    def cancel_once_it_is_watched() -> None:
        wait_until(lambda: shell.parts.jobs.redis.zcard("kd:streams:alice"))
        time.sleep(2)
        shell.parts.jobs.change("cancel", job_id)

    threading.Thread(target=cancel_once_it_is_watched).start()
    lines = shell.kd("watch", job_id).stderr.splitlines()
    assert lines == ["train: queued", why, "paused", "train: queued", "cancelled"]
    assert why not in shell.kd("watch", job_id).stderr, "what has ended waits for nobody"
    shell.parts.jobs.hide_worker("cpu:1")


def test_a_running_job_saves_before_it_stops(shell: Shell) -> None:
    claim = running(shell.parts, ALICE)
    assert "as soon as its state is saved" in shell.ok("jobs", "pause", claim.id)
    assert json.loads(shell.ok("jobs", "cancel", claim.id, "--json"))["status"] == "cancelling"


def test_jobs_are_listed_by_label_and_status(shell: Shell) -> None:
    job_id = shell.parts.jobs.create(make_config("quick", labels={"team": "x"}), ALICE).id
    other = shell.parts.jobs.create(make_config("quick"), ALICE).id
    listed = shell.ok("jobs", "ls", "--label", "team:x")
    assert job_id in listed
    assert other not in listed
    shell.parts.jobs.change("pause", job_id)
    assert json.loads(shell.ok("jobs", "ls", "--status", "paused", "--json"))[0]["id"] == job_id


def test_a_clone_has_the_changes(shell: Shell) -> None:
    folder = shell.parts.settings.home / "inputs"
    job = make_config(
        "quick",
        data={"train": f"{folder}/text.txt"},
        student=STUDENT | {"init": STUDENT["init"] | {"tokenizer": str(folder)}},
    )
    old = shell.parts.jobs.create(job, ALICE).id
    made = json.loads(
        shell.ok(
            "jobs", "clone", old, "--set", "train.max_steps=7", "--set", "priority=9", "--json"
        )
    )
    assert (made["config"]["train"]["max_steps"], made["priority"]) == (7, 9)
    assert made["config"]["student"] == shell.parts.job(old).config["student"]
    assert shell.kd("jobs", "clone", old, "--set", "train.max_step=7").returncode == 2


STUDENT = {"init": {"layers": 1, "hidden_size": 16}}


@pytest.mark.long
def test_a_log_is_printed_whole_by_its_end_and_as_it_grows(shell: Shell) -> None:
    claim = running(shell.parts, ALICE)
    folder = shell.parts.settings.run_dir(claim.id)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    log.write_bytes(b"one\ntwo\n\xff three\n")
    whole = subprocess.run(
        [sys.executable, "-m", "services.terminal.cli", "jobs", "logs", claim.id],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | {"KD_SERVER": shell.parts.settings.server, "KD_API_KEY": shell.key},
    )
    assert whole.stdout == b"one\ntwo\n\xff three\n", whole.stderr
    log.write_bytes(b"one\ntwo\nthree\n")
    assert shell.ok("jobs", "logs", claim.id, "--tail", "1") == "three\n"
    lines = shell.ok("jobs", "logs", claim.id, "--json").splitlines()
    assert [json.loads(line)["line"] for line in lines] == ["one", "two", "three"]

    def go_on() -> None:
        time.sleep(2.0)
        with log.open("ab") as more:
            more.write(b"four\n")
        time.sleep(0.5)
        shell.parts.jobs.finish(claim, "succeeded")

    threading.Thread(target=go_on).start()
    assert shell.ok("jobs", "logs", claim.id, "--follow") == "one\ntwo\nthree\nfour\n"


def test_an_empty_log_is_explained(shell: Shell) -> None:
    claim = running(shell.parts, ALICE)
    folder = shell.parts.settings.run_dir(claim.id)
    folder.mkdir(parents=True)
    (folder / "log.txt").touch()
    for more in ((), ("--tail", "5")):
        done = shell.kd("jobs", "logs", claim.id, *more)
        assert (done.returncode, done.stdout) == (0, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("The log is empty: it holds what the libraries of a run print, ")
        assert line.endswith(f"`kd jobs events {claim.id}` shows what the job did.")


def test_events_are_printed(shell: Shell) -> None:
    claim = running(shell.parts, ALICE)
    tell(shell.parts, claim, ("warning", {"message": "look out"}))
    assert "look out" in shell.ok("jobs", "events", claim.id)
    events = json.loads(shell.ok("jobs", "events", claim.id, "--types", "status", "--json"))
    assert [event["data"]["status"] for event in events] == ["queued", "running"]


def test_a_job_is_followed_to_its_end(shell: Shell) -> None:
    claim = running(shell.parts, ALICE)
    threading.Timer(1.5, shell.parts.jobs.finish, (claim, "succeeded")).start()
    done = shell.kd("watch", claim.id)
    assert done.returncode == 0, done.stderr
    assert "succeeded" in done.stderr


def test_a_whole_id_is_looked_up_and_a_part_of_one_is_found(shell: Shell) -> None:
    job_id = shell.parts.jobs.create(make_config("quick"), ALICE).id
    with Client(shell.parts.settings.server, shell.key) as client:
        assert (
            find_job(client, job_id).id
            == find_job(client, job_id.removeprefix("job_")).id
            == job_id
        )
        assert find_job(client, job_id[:-1]).id == job_id
        assert find_job(client, "last").id == job_id
        with pytest.raises(Refused, match="names 0 jobs"):
            find_job(client, "job_zzz")
        with pytest.raises(Refused, match="There is no"):
            find_job(client, "../../caches/" + "x" * 13)
        for nothing in ("", "job_"):  # it would name the only job
            with pytest.raises(Refused, match="is empty"):
                find_job(client, nothing)
    with pytest.raises(Unreachable), Client("http://127.0.0.1:1", patience=0) as nobody:
        find_job(nobody, "last")
