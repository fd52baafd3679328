"""The command ``kd``: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from redis.exceptions import RedisError

from bench.support.harness import Parts, is_alive, make_body
from bench.support.paths import AUSTEN, ROOT
from bench.support.small.caches import make_cache, make_identity
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.disk import locked
from kd.client.errors import Refused, Unreachable
from kd.files import write_json
from kd.progress import Event
from kd.python.version import read_version
from services.settings import Settings
from services.store.connection import connect_redis
from services.terminal.client import FOLLOW_PATIENCE, make_client
from services.terminal.commands import demo
from services.terminal.commands.up import ServiceProcess
from services.terminal.display import Display
from tests.support.commands import KD, kd

MakeParts = Callable[..., Parts]


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start the command with Ctrl-C enabled, as a terminal does.

    If this test run is a background job, its children would ignore Ctrl-C.
    """
    return subprocess.Popen(
        [*KD, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"} | environment,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 -- sets one signal
    )


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("job files")
    shutil.copy(AUSTEN / "teacher" / "tokenizer.json", folder)
    (folder / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)

    def write(name: str, **changes: object) -> Path:
        job = make_body(name, data={"train": str(folder / "text.txt")}, **changes)
        job["student"]["init"]["tokenizer"] = str(folder)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(job))
        return folder / f"{name}.yaml"

    return write


#: Modules that every other module of ours brings with it.
PACKAGES = {"cache", "cache.errors", "services"}


def test_the_version_needs_no_command() -> None:
    done = kd("--version")
    assert (done.returncode, done.stdout.strip()) == (0, read_version()), done.stderr


def test_help_imports_the_command_line_and_nothing_else() -> None:
    """Help spends its time on imports: 0.2 s of one core, as much as typer alone."""
    code = """
import contextlib, io, sys
from services.terminal.cli import main
sys.argv = ["kd", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(*(name for name in sys.modules if name.split(".")[0] in {"services", "kd", "cache"}))
print(*sys.modules)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    ours, loaded = (line.split() for line in printed.splitlines())
    assert all(name.startswith("services.terminal") for name in set(ours) - PACKAGES), ours
    heavy = {"torch", "pydantic", "redis", "celery", "httpx", "numpy", "asyncio", "ssl"}
    assert heavy & set(loaded) == set()


def test_every_command_has_a_sentence() -> None:
    text = kd("--help").stdout
    for command in (
        "up",
        "serve",
        "worker",
        "run",
        "submit",
        "watch",
        "jobs",
        "cache",
        "validate",
        "doctor",
        "demo",
    ):
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE), command


def test_submit_follows_to_the_end(service: Parts, job_file: Callable[..., Path]) -> None:
    done = kd("submit", job_file("quick"), "--server", service.settings.server)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^student: .*/runs/job_\w+/student$", done.stdout, re.MULTILINE)
    assert "train: 3/3 steps" in done.stderr, "no terminal: plain lines"
    assert "held-out perplexity 20.50" in done.stderr
    assert "\x1b" not in done.stderr
    failed = kd("submit", job_file("fails"), "--server", service.settings.server)
    assert failed.returncode == 100
    assert "error: text.txt is empty." in failed.stderr
    assert "remedy: Give a file with text in it." in failed.stderr


def test_submit_detached_and_the_read_commands(
    service: Parts, job_file: Callable[..., Path]
) -> None:
    there = {"KD_SERVER": service.settings.server}
    job_id = kd(
        "submit", job_file("quick"), "--detach", "--set", "train.learning_rate=0.5", **there
    ).stdout.strip()
    service.wait_for(job_id, "succeeded")
    for name in (job_id, job_id[:-4], job_id.removeprefix("job_")[:-4], "last"):
        shown = json.loads(kd("jobs", "show", name, "--json", **there).stdout)
        assert shown["id"] == job_id
    assert shown["config"]["train"]["learning_rate"] == 0.5
    assert "status     succeeded" in re.sub(
        " {4,}", "     ", kd("jobs", "show", "last", **there).stdout
    )
    listed = kd("jobs", "ls", **there).stdout
    assert listed.splitlines()[1].startswith(job_id)
    as_json = json.loads(kd("jobs", "ls", "--json", "--limit", "1", **there).stdout)
    assert [job["id"] for job in as_json] == [job_id]
    watched = kd("watch", "last", "--json", **there)
    assert (watched.returncode, json.loads(watched.stdout)["status"]) == (0, "succeeded")
    service.jobs.redis.delete(f"kd:job:{job_id}:events")  # as it is after thirty days
    assert kd("watch", job_id, **there).returncode == 0
    unknown = kd("jobs", "show", "zzz", **there)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "'zzz' names 0 jobs" in unknown.stderr


def test_cancel_ends_a_watch_with_its_own_code(service: Parts) -> None:
    there = {"KD_SERVER": service.settings.server}
    job_id = service.submit("endless")
    service.child_pid(job_id)
    watch = start("watch", job_id, **there)
    assert kd("jobs", "cancel", job_id, **there).returncode == 0
    assert watch.wait(20) == 103
    watch.communicate()


def test_ctrl_c_of_a_watch_leaves_the_job_running(service: Parts) -> None:
    job_id = service.submit("endless")
    service.child_pid(job_id)
    watch = start("watch", job_id, "--server", service.settings.server)
    assert watch.stderr is not None
    wait_until(lambda: "running" in watch.stderr.readline())
    watch.send_signal(signal.SIGINT)
    assert watch.wait(10) == 130
    assert f"kd jobs cancel {job_id}" in watch.communicate()[1]
    assert service.job(job_id).status == "running"
    service.jobs.change("cancel", job_id)
    service.wait_for(job_id, "cancelled")


@pytest.mark.long
def test_a_watch_outlives_a_restart_of_the_api(new_parts: MakeParts) -> None:
    parts = new_parts()
    api = parts.start_api()
    job_id = parts.submit("quick")
    watch = start("watch", job_id, "--json", "--server", parts.settings.server)
    assert watch.stderr is not None
    assert "queued" in watch.stderr.readline()  # the command has found the job and follows it
    api.kill()
    api.wait()
    parts.start_worker()
    parts.start_api()
    output, errors = watch.communicate(timeout=PATIENCE_SECONDS)
    assert watch.returncode == 0, errors
    assert json.loads(output)["status"] == "succeeded"
    assert errors.count("3/3 steps") == 1, "nothing is shown twice"


def test_following_a_job_waits_for_an_absent_api(new_parts: MakeParts) -> None:
    parts = new_parts()
    job_id = parts.submit("quick")
    with make_client(parts.settings.server, None) as client, ThreadPoolExecutor(1) as follower:
        ask = partial(client.job, job_id)
        ask_patiently = partial(client.with_patience(FOLLOW_PATIENCE).job, job_id)
        with pytest.raises(Unreachable):
            ask()
        answer = follower.submit(ask_patiently)
        parts.start_api()
        assert answer.result().status == "queued"
        parts.server.stop()
        with pytest.raises(Refused, match="Redis"):
            ask()
        answer = follower.submit(ask_patiently)
        parts.server.start()
        assert answer.result().status == "queued"
        with pytest.raises(Refused, match="There is no job"):
            client.with_patience(FOLLOW_PATIENCE).job("job_" + 26 * "0")
        parts.server.stop()
        with pytest.raises(Refused, match="Redis"):
            client.with_patience(0.1).job(job_id)
        parts.server.start()


def test_without_a_server_the_exit_code_is_3() -> None:
    for command in (("jobs", "ls"), ("watch", "last")):
        done = kd(*command, "--server", "http://127.0.0.1:9")
        assert (done.returncode, done.stdout) == (3, "")
        assert "error: No server answers at http://127.0.0.1:9" in done.stderr
        assert "remedy: Start one with `kd up`" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "given, server",
    [
        ({}, "http://127.0.0.1:8000"),
        ({"port": 18432}, "http://127.0.0.1:18432"),
        ({"port": 0}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000"),  # noqa: S104 -- not bound
        ({"host": "::", "port": 81}, "http://[::1]:81"),
        ({"host": "node-7", "server": "http://elsewhere"}, "http://elsewhere"),
    ],
)
def test_the_command_line_calls_the_api_of_its_settings(given: dict[str, Any], server: str) -> None:
    assert Settings(**given).server == server


def test_the_port_of_the_environment_is_called() -> None:
    assert "No server answers at http://127.0.0.1:9:" in kd("jobs", "ls", KD_PORT="9").stderr


def test_an_invalid_job_is_exit_code_2_everywhere(
    service: Parts, job_file: Callable[..., Path]
) -> None:
    file = job_file("quick")
    for command in ("validate", "run"):
        done = kd(command, file, "--set", "train.learning_rat=1")
        assert done.returncode == 2
        assert "Did you mean learning_rate?" in done.stderr
    refused = kd(
        "submit", file, "--set", "data.train=nowhere.txt", "--server", service.settings.server
    )
    assert refused.returncode == 2
    assert "nowhere.txt" in refused.stderr
    report = json.loads(kd("validate", file, "--set", "name=?", "--json").stdout)
    assert (report["valid"], report["problems"][0]["pointer"]) == (False, "/name")
    good = kd("validate", file, "--json")
    found = {"problems": [], "warnings": [], "notices": [], "learned": []}
    expected = {"valid": True, "packing": True} | found
    assert (good.returncode, json.loads(good.stdout)) == (0, expected)
    assert kd("validate", file.parent / "none.yaml").returncode == 2
    assert kd("nonsense").returncode == 2
    assert kd("worker", "--queues", "gpu").returncode == 2
    wrong = kd("up", KD_LEASE_SECONDS="soon")
    assert wrong.returncode == 2
    assert "KD_LEASE_SECONDS" in wrong.stderr


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_job_s_files_are_opened_before_it_runs(
    command: str, job_file: Callable[..., Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "It was a dark night."}\n', encoding="utf-8")
    done = kd(command, job_file("quick"), "--set", f"data.train={rows}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "row 1" in line]
    assert "data.train.0: " in line and "has no 'text'" in line


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_a_warning_to_validate_and_refused_by_run(
    job_file: Callable[..., Path], tmp_path: Path
) -> None:
    asked = (job_file("quick"), "--set", "train.report_to=[wandb]", "--home", tmp_path)
    checked = kd("validate", *asked)
    assert (checked.returncode, checked.stderr.partition(" Install")[0]) == (
        0, "warning: train.report_to.0: wandb is not installed.",
    )  # fmt: skip
    (warning,) = json.loads(kd("validate", *asked, "--json").stdout)["warnings"]
    assert (warning["pointer"], "potstill[track]" in warning["remedy"]) == (
        "/train/report_to/0",
        True,
    )
    refused = kd("run", *asked)
    assert (refused.returncode, "wandb is not installed" in refused.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


def test_up_starts_nothing_that_others_could_call_without_a_key(tmp_path: Path) -> None:
    refused = kd("up", "--host", "0.0.0.0", "--home", tmp_path)  # noqa: S104 -- refused
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: the API would listen on 0.0.0.0")
    assert "remedy: Make a key" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_the_log_tail_is_that_of_the_last_start(tmp_path: Path) -> None:
    (tmp_path / "api.log").write_text("what an earlier one said\n")
    part = ServiceProcess("api", "services.nothing", {}, tmp_path / "api.log")
    part.start()
    assert part.process is not None
    part.process.wait(30)
    assert "services.nothing" in part.read_log_tail()
    assert "earlier" not in part.read_log_tail()


def test_v_shows_the_traceback(job_file: Callable[..., Path]) -> None:
    file = job_file("quick")
    assert "Traceback" not in kd("run", file, "--set", "data.train=no").stderr
    assert "Traceback" in kd("-v", "run", file, "--set", "data.train=no").stderr


def test_caches_are_listed_shown_and_verified(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "caches")
    home = ("--home", tmp_path)
    for run, reused in (("again", True), ("first", False)):
        inputs = {"data": {"train": ["a.txt", {"path": "owner/set"}]}}
        made = {"fingerprint": folder.name, "reused": reused, "inputs": inputs}
        write_json(tmp_path / "runs" / run / "cache.json", made)
    (listed,) = json.loads(kd("cache", "ls", "--json", *home).stdout)
    assert (listed["fingerprint"], listed["complete"]) == (folder.name, True)
    assert (listed["text"], listed["made_by"]) == ("a.txt, owner/set", "first")
    assert folder.name[:12] in kd("cache", "ls", *home).stdout
    assert "owner/set" in kd("cache", "info", folder.name, *home).stdout
    assert folder.name in kd("cache", "info", folder.name[:4], *home).stdout, (
        "as a job must name it"
    )
    shown = json.loads(kd("cache", "info", folder.name[:6], "--json", *home).stdout)
    assert shown["fingerprint"] == folder.name
    assert shown["identity"]
    plain = make_identity()
    rounded = replace(plain, teacher=replace(plain.teacher, quantization="int8"))
    make_cache(tmp_path / "caches", rounded)
    assert "float32, weights in int8" in kd("cache", "info", rounded.fingerprint, *home).stdout
    assert kd("cache", "verify", folder.name[:6], *home).returncode == 0
    victim = max(
        (file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    bad = kd("cache", "verify", folder.name[:6], *home)
    assert bad.returncode == 4
    assert "error:" in bad.stderr
    assert json.loads(kd("cache", "verify", folder.name, "--json", *home).stdout)["problems"]
    for nothing in ("zzz", ""):
        refused = kd("cache", "info", nothing, *home)
        assert (refused.returncode, f"{nothing!r} names 0 caches" in refused.stderr) == (1, True)


def test_a_run_of_kind_verify_ends_with_a_verdict(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "caches")
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"kind": "verify", "cache": {"fingerprint": folder.name}}))
    done = kd("run", job, "--home", tmp_path)
    verdict = f"cache {folder.name[:12]}: no byte has changed since it was sealed"
    assert (done.returncode, done.stderr.splitlines()) == (0, ["precompute: verifying", verdict])
    found = json.loads(kd("run", job, "--home", tmp_path, "--json").stdout)
    assert found == {"cache": {"fingerprint": folder.name, "verified": True}}
    victim = max(
        (file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    victim.write_bytes(victim.read_bytes()[::-1])
    bad = kd("run", job, "--home", tmp_path)
    assert bad.returncode != 0
    assert "is damaged" in bad.stderr
    assert verdict not in bad.stderr


def test_unknown_facts_of_a_cache_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.console import Console

    with Display(Console(width=120)) as display:
        display.show(Event("cache", {"fingerprint": "5f" * 16}))
        display.show(
            Event("cache", {"fingerprint": "5f" * 16, "bytes_per_token": 23.04, "reused": True})
        )
    assert capsys.readouterr().out.splitlines() == [
        "cache 5f5f5f5f5f5f",
        "cache 5f5f5f5f5f5f: bytes per token 23.0 (captured before)",
    ]


def test_doctor_says_what_is_there(service: Parts) -> None:
    done = kd("doctor", "--json", "--server", service.settings.server)
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert findings["python"]["ok"]
    assert findings["torch"]["ok"]
    assert findings["gpu"]["ok"]
    assert findings["kernels"]["ok"], findings["kernels"]["detail"]
    for kernel in ("reduce_rows", "write_gradient"):
        assert kernel in findings["kernels"]["detail"]
    if not torch.cuda.is_available():
        assert "not compiled: no GPU here" in findings["kernels"]["detail"]
    assert findings["service"]["detail"].endswith("1 worker(s)")
    broken = kd("doctor", "--json", KD_REDIS_URL="redis://127.0.0.1:9/0")
    assert broken.returncode == 1


@pytest.mark.long
def test_health_checks_of_the_containers(service: Parts) -> None:
    def check(*arguments: str, **environment: str) -> int:
        return subprocess.run(
            [sys.executable, "-m", "services.process.health", *arguments],
            cwd=ROOT,
            env=os.environ | service.settings.environment() | environment,
            capture_output=True,
        ).returncode

    assert check("api") == check("worker") == 0
    assert check("api", KD_PORT="9") == 1
    assert check("worker", KD_REDIS_URL="redis://127.0.0.1:9/0") == 1
    assert check() == check("cat") == 2


@pytest.fixture
def up(_server_binary: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start(
        "up",
        "--port",
        "0",
        "--home",
        tmp_path / "home",
        "--json",
        KD_CHILD_MODULE="bench.support.scripted_child",
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"kd up said nothing, and {process.communicate()[1]!r}")
    told = json.loads(line)
    assert (told["home"], told["pid"]) == (str(tmp_path / "home"), process.pid)
    yield process, told["server"]
    if process.poll() is None:
        process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)


def descendants(pid: int) -> list[int]:
    """List every process below ``pid``, from /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = []
    new = {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found += sorted(new)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.long
def test_up_runs_everything_and_one_signal_stops_it(
    up: tuple[subprocess.Popen[str], str], job_file: Callable[..., Path], number: signal.Signals
) -> None:
    process, server = up
    assert kd("submit", job_file("quick"), "--server", server).returncode == 0
    job_id = kd("submit", job_file("endless"), "--detach", "--server", server).stdout.strip()
    wait_until(lambda: httpx.get(f"{server}/jobs/{job_id}").json()["progress"]["done"])
    processes = descendants(process.pid)
    assert len(processes) == 6, "server, API, what plans, worker, its child and what guards that"
    process.send_signal(number)
    assert process.wait(20) == 0
    assert [pid for pid in processes if is_alive(pid)] == []


@pytest.mark.long
def test_up_replaces_what_dies(
    up: tuple[subprocess.Popen[str], str], job_file: Callable[..., Path]
) -> None:
    process, server = up
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)

    def submitted() -> bool:
        return kd("submit", job_file("quick"), "--server", server).returncode == 0

    wait_until(submitted)


@pytest.mark.long
def test_a_killed_up_leaves_no_worker_and_the_next_one_goes_on(
    up: tuple[subprocess.Popen[str], str], job_file: Callable[..., Path], tmp_path: Path
) -> None:
    process, server = up
    job_id = kd("submit", job_file("steps"), "--detach", "--server", server).stdout.strip()
    wait_until(lambda: httpx.get(f"{server}/jobs/{job_id}").json()["progress"]["done"])
    below = descendants(process.pid)
    process.kill()
    wait_until(
        lambda: sum(map(is_alive, below)) == 1, 10
    )  # only the store lives on; the next one adopts it
    again = start(
        "up",
        "--port",
        "0",
        "--home",
        tmp_path / "home",
        KD_CHILD_MODULE="bench.support.scripted_child",
    )
    try:
        assert again.stdout is not None
        found = re.search(r"http://\S+", again.stdout.readline())
        assert found
        assert kd("watch", job_id, "--server", found.group()).returncode == 0
        job = httpx.get(f"{found.group()}/jobs/{job_id}").json()
        assert (job["status"], job["attempt"]) == ("succeeded", 1), (
            "the parts were asked to stop, and saved"
        )
    finally:
        again.terminate()
        again.communicate(timeout=PATIENCE_SECONDS)
    assert not any(map(is_alive, below))


def test_up_reports_a_port_or_store_that_it_cannot_use(service: Parts, tmp_path: Path) -> None:
    done = kd("up", "--port", service.settings.port, "--home", tmp_path)
    assert done.returncode == 1
    assert "is in use" in done.stderr
    assert "--port 0" in done.stderr
    # No machine has this address: it is for documents.
    keys = {"KD_API_KEYS_FILE": str(tmp_path / "keys")}
    assert kd("keys", "new", "me", **keys).returncode == 0
    done = kd("up", "--host", "192.0.2.1", "--port", "8000", "--home", tmp_path, **keys)
    assert done.returncode == 1
    assert "cannot listen on port 8000 of 192.0.2.1: Cannot assign" in done.stderr
    done = kd("up", "--port", "0", "--home", tmp_path, KD_REDIS_URL="redis://:secret@127.0.0.1:9/0")
    assert done.returncode == 1
    assert "KD_REDIS_URL" in done.stderr
    assert "secret" not in done.stderr


@pytest.fixture
def example(job_file: Callable[..., Path], tmp_path: Path) -> dict[str, str]:
    """A source folder whose example job is a script."""
    folder = tmp_path / "root" / "examples" / "austen"
    folder.mkdir(parents=True)
    job_file("reports").rename(folder / "job.yaml")
    return {"KD_ROOT": str(tmp_path / "root"), "KD_CHILD_MODULE": "bench.support.scripted_child"}


def test_the_demo_goes_through_the_service_and_leaves_nothing_running(
    example: dict[str, str], tmp_path: Path
) -> None:
    done = kd("demo", "--baseline", "--home", tmp_path / "home", **example)
    assert done.returncode == 0, done.stderr
    assert (
        len(
            re.findall(
                r"^curves: +http://127\.0\.0\.1:\d+/jobs/job_\w+$", done.stderr, re.MULTILINE
            )
        )
        == 2
    )
    assert done.stdout.count("# The report") == done.stdout.count("status: succeeded") == 2
    assert re.search(r"^student: .*/student$", done.stdout, re.MULTILINE)
    assert re.search(r"student's, after training +20.500 +20.500", done.stdout)
    assert "teacher's perplexity" not in done.stdout, "what no report has is not shown"
    port = (tmp_path / "home" / "redis" / "port").read_text()
    with pytest.raises(RedisError):
        connect_redis(f"redis://127.0.0.1:{port}/0").ping()


def test_a_failed_demo_says_why(example: dict[str, str], tmp_path: Path) -> None:
    job = tmp_path / "root" / "examples" / "austen" / "job.yaml"
    job.write_text(job.read_text().replace("name: reports", "name: fails"))
    done = kd("demo", "--home", tmp_path / "home", **example)
    assert done.returncode == 1
    assert "error: fails failed: text.txt is empty." in done.stderr
    assert "remedy: Give a file with text in it." in done.stderr


@pytest.mark.long
def test_an_interrupted_run_ends_in_the_student_of_an_undisturbed_job(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    """Compare a ``kd run`` that was interrupted and continued with the same job in the service."""
    (tmp_path / "text.txt").write_text(
        "It is a truth universally acknowledged, that it rains.\n" * 200
    )
    job = {
        "kind": "train",
        "name": "tiny",
        "student": {
            "init": {"layers": 1, "hidden_size": 16, "tokenizer": "examples/austen/teacher"}
        },
        "data": {"train": str(tmp_path / "text.txt"), "sequence_length": 32, "max_eval_samples": 4},
        "loss": {"alpha": 1.0},
        "train": {"max_steps": 300, "batch_size": 2, "eval_steps": 100, "save_steps": 100},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(job))
    parts = new_parts(child_module="services.worker.stage_child")
    parts.start_api()
    parts.start_worker()
    submitted = start("submit", tmp_path / "tiny.yaml", "--json", "--server", parts.settings.server)

    run = ("run", tmp_path / "tiny.yaml", "--home", tmp_path / "home")
    process = start(*run)
    assert process.stderr is not None
    wait_until(lambda: "step 0:" in process.stderr.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "Run the same job again to continue from here." in process.communicate()[1]
    again = kd(*run)
    assert again.returncode == 0, again.stderr
    assert "step 0:" not in again.stderr, "it goes on"
    assert "# tiny" in again.stdout

    output, errors = submitted.communicate(timeout=PATIENCE_SECONDS)
    assert submitted.returncode == 0, errors
    record = json.loads(output)
    assert record["metrics"]["step"] == 300
    here = (tmp_path / "home" / "runs" / "tiny" / "student" / "model.safetensors").read_bytes()
    assert Path(record["artifacts"]["student"], "model.safetensors").read_bytes() == here


def test_a_run_whose_folder_another_uses_says_so_and_waits(
    job_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with locked(folder / ".lock"):
        waiting = start("run", job_file("quick"), "--home", tmp_path, "--run-dir", folder)
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        assert said.startswith(f"Another run uses {folder}; this one waits") and "--run-dir" in said
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(10) == 130
        assert "again" not in waiting.communicate()[1]


def test_a_terminal_gets_bars_and_a_pipe_gets_lines() -> None:
    from io import StringIO

    from rich.console import Console

    for terminal, words in ((True, "2/4"), (False, "train: 4/4 steps  1,000 tok/s  loss 1.500")):
        screen = StringIO()
        with Display(Console(file=screen, force_terminal=terminal, width=120)) as display:
            display.show(Event("stage", {"stage": "train", "phase": "training"}))
            display.show(Event("metrics", {"step": 1, "loss": 1.5}))
            told = {"done": 2, "total": 4, "unit": "steps", "tokens_per_second": 1000.0}
            display.show(Event("progress", told))
            time.sleep(0.2)
            told = {"done": 4, "total": 4, "unit": "steps", "tokens_per_second": 1000.0}
            display.show(Event("progress", told))
            display.show(Event("unheard_of", {}))
        assert words in screen.getvalue()


def test_the_ranks_of_each_host_are_shown_with_the_slowest_and_its_alarm() -> None:
    from io import StringIO

    from rich.console import Console

    lines = StringIO()
    hosts = {0: "gpu-a", 1: "gpu-a", 2: "gpu-b", 3: "gpu-b"}
    usual = {f"rank_seconds/rank {rank} on {host}": 0.5 for rank, host in hosts.items()}
    slow = usual | {"rank_seconds/rank 3 on gpu-b": 0.75}
    done = {"done": 4, "total": 4, "unit": "steps"}
    alarm = {"ok": False, "message": "The other ranks wait.", "remedy": "Look at its host."}
    with Display(Console(file=lines, width=120)) as display:
        display.show(Event("scalars", {"step": 2, "memory/peak_bytes": 1.0}))
        display.show(Event("scalars", {"step": 2, **usual}))
        display.show(Event("scalars", {"step": 4, **slow}))
        display.show(Event("progress", done))
        display.show(Event("check", {"check": "parity", "ok": True, "message": "", "remedy": ""}))
        display.show(Event("check", {"check": "slow_rank", **alarm}))
    assert lines.getvalue().splitlines() == [
        "4 ranks: 2 on gpu-a, 2 on gpu-b",
        "4/4 steps  slowest rank 3 on gpu-b (1.50 x)",
        "warning: The other ranks wait. Look at its host.",
    ]


def test_a_line_without_a_stage_has_no_prefix() -> None:
    from io import StringIO

    from rich.console import Console

    lines = StringIO()
    with Display(Console(file=lines, width=120)) as display:
        display.show(Event("stage", {"stage": "", "phase": "writing"}))
        display.show(Event("progress", {"done": 4, "total": 4, "unit": "sequences"}))
    assert lines.getvalue().splitlines() == ["writing", "4/4 sequences"]


def test_a_perplexity_is_shown_with_its_tokens_and_few_have_an_interval() -> None:
    from io import StringIO

    from rich.console import Console

    lines = StringIO()
    found = {"step": 3, "validation_perplexity": 20.5, "validation_tokens": 38250}
    few = {"validation_perplexity_low": 18.25, "validation_perplexity_high": 23.0}
    with Display(Console(file=lines, width=120)) as display:
        display.show(Event("evaluation", found))
        display.show(Event("evaluation", found | {"validation_tokens": 1500, **few}))
    assert lines.getvalue().splitlines() == [
        "step 3: held-out perplexity 20.50 (38,250 tokens)",
        "step 3: held-out perplexity 20.50 (1,500 tokens, 95 % interval 18.25 to 23.00)",
    ]


@pytest.mark.parametrize(
    ("with_teacher", "without", "teacher", "share"),
    [
        (math.e**2, math.e**3, math.e, "50%"),
        (math.e**3, math.e**3, math.e, "0%"),
        (20.0, 30.0, None, None),
    ],
)
def test_the_demo_shows_the_share_of_the_distance(
    with_teacher: float, without: float, teacher: float | None, share: str | None
) -> None:
    found = demo._compute_share_of_distance(
        {"student_perplexity": with_teacher, "teacher_perplexity": teacher},
        {"student_perplexity": without},
    )
    assert (None if found is None else f"{found:.0%}") == share
