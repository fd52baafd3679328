"""Where the relative paths of `kd submit` and `kd jobs clone` start, and what they warn of."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import httpx
import pytest
import yaml

from bench.support.harness import Parts, make_body
from bench.support.paths import AUSTEN
from bench.support.waiting import wait_until
from kd.client.client import Client
from kd.config.jobfile import load_config
from services.process import file_view
from services.terminal.commands import jobs
from tests.support.commands import kd

#: Resources that no machine has, as options of a command and in words.
GREEDY = ("--set", "resources.gpus=1", "--set", "resources.memory=1000GiB")
NEEDS = "1 GPU with 1000 GiB"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a tokenizer's folder, and a job file that names both relatively."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    (folder / "teacher").mkdir()
    shutil.copy(AUSTEN / "teacher" / "tokenizer.json", folder / "teacher")
    (folder / "job.yaml").write_text(yaml.safe_dump(make_body("quick")))
    return folder


def show(service: Parts, job_id: str) -> dict[str, object]:
    config = service.job(job_id.strip()).config
    return {"train": config["data"]["train"], "tokenizer": config["student"]["init"]["tokenizer"]}


def test_a_relative_path_means_the_folder_in_which_submit_is_typed(
    service: Parts, work: Path
) -> None:
    there = {"KD_SERVER": service.settings.server}
    checked = kd("validate", "job.yaml", folder=work)
    assert checked.returncode == 0, checked.stderr
    done = kd("submit", "job.yaml", "--detach", folder=work, **there)
    assert (done.returncode, done.stderr) == (0, "")
    assert show(service, done.stdout) == {
        "train": [str(work / "text.txt")],
        "tokenizer": str(work / "teacher"),
    }
    (work / "more.txt").write_text("Persuasion.\n" * 50)
    changed = ("--set", "data.train=more.txt", "--set", "train.max_steps=2")
    clone = kd("jobs", "clone", "last", *changed, folder=work, **there)
    assert (clone.returncode, clone.stderr) == (0, "")
    assert show(service, clone.stdout)["train"] == [str(work / "more.txt")]
    missing = kd("submit", "job.yaml", "--set", "data.train=no.txt", folder=work, **there)
    assert (missing.returncode, f"no file matches '{work}/no.txt'" in missing.stderr) == (2, True)


def test_for_a_service_with_other_files_paths_stay_and_a_line_says_so(
    service: Parts,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KD_ROOT", str(work))
    config = load_config(work / "job.yaml")
    with Client(service.settings.server) as client:
        assert jobs._place_paths(client, config)["data"]["train"] == [str(work / "text.txt")]
        assert capsys.readouterr().err == ""
        # The mounts of another process: what a service in a container shows.
        monkeypatch.setattr(file_view, "_MOUNTS", work)
        assert jobs._place_paths(client, config)["data"]["train"] == ["text.txt"]
        assert "start in the folder of the service (KD_ROOT)" in capsys.readouterr().err
        assert jobs._place_paths(client, config, config)["data"]["train"] == ["text.txt"]
        assert capsys.readouterr().err == "", "the job of a clone has its paths from the service"


def test_a_job_that_no_worker_takes_says_so_at_once(service: Parts, work: Path) -> None:
    greedy = {"resources": {"gpus": 1, "memory": "1000GiB"}}
    body = make_body("quick", data={"train": str(work / "text.txt")}, **greedy)
    body["student"]["init"]["tokenizer"] = str(work / "teacher")
    posted = httpx.post(f"{service.settings.server}/jobs", json=body)
    why = f"No worker of stage train has {NEEDS}; the job waits until one starts that has."
    assert (posted.status_code, posted.json()["reason"]) == (202, why)
    asked = ("submit", "job.yaml", "--detach", *GREEDY)
    done = kd(*asked, folder=work, KD_SERVER=service.settings.server)
    assert (done.returncode, done.stderr) == (0, f"warning: {why}\n")
    for job_id in (posted.json()["id"], done.stdout.strip()):
        service.jobs.change("cancel", job_id)


def test_submit_that_follows_says_once_why_the_job_waits(service: Parts, work: Path) -> None:
    def find_followed() -> list[str]:
        jobs = httpx.get(f"{service.settings.server}/jobs?status=queued").json()["data"]
        return [job["id"] for job in jobs if job["name"] == "followed"]

    def cancel_it() -> None:
        service.jobs.change("cancel", *wait_until(find_followed))

    threading.Thread(target=cancel_it).start()
    asked = ("submit", "job.yaml", "--follow", "--set", "name=followed", *GREEDY)
    done = kd(*asked, folder=work, KD_SERVER=service.settings.server)
    assert done.returncode == 103, done.stderr
    why = f"No worker of stage train has {NEEDS}; the job waits until one starts that has."
    assert f"warning: {why}" in done.stderr.splitlines()
    assert done.stderr.count(why) == 1


def test_validate_warns_of_what_only_this_machine_lacks(work: Path) -> None:
    asked = ("job.yaml", *GREEDY, "--set", "webhook=https://example.org/x")
    done = kd("validate", *asked, "--json", folder=work)
    assert done.returncode == 0, done.stderr
    warnings = {each["pointer"]: each["detail"] for each in json.loads(done.stdout)["warnings"]}
    assert warnings == {
        "/webhook": "webhooks are off on this server.",
        "/resources": f"this machine lacks {NEEDS}, so no worker on it takes the job.",
    }
