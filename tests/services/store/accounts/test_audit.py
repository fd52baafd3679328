"""The audit log: nothing torn is believed, nothing is lost when several processes write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from cache.errors import StorageError
from services.settings import Settings
from services.store.audit import FILE, AuditLog, AuditQuery
from services.store.audit import AuditPage as Page

WRITER = """
import sys
from services.settings import Settings
from services.store.audit import AuditLog
log = AuditLog(Settings(home=sys.argv[1], audit_bytes=8192, audit_files=100))
number = 0
while number < int(sys.argv[3]):
    log.write(sys.argv[2], "job.create", f"job_{number}", name="x" * (number % 300))
    number += 1
    print(number, flush=True)
"""


def make_log(home: Path, **settings: Any) -> AuditLog:
    return AuditLog(Settings(home=home, **settings))


def everything(log: AuditLog, query: AuditQuery | None = None, size: int = 100) -> list[Any]:
    """All entries, newest first, page by page."""
    page = log.read_page(query or AuditQuery(), size)
    found = page.entries
    while page.next_cursor is not None:
        page = log.read_page(query or AuditQuery(), size, page.next_cursor)
        found += page.entries
    return found


def start_writer(home: Path, actor: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(home), actor, str(count)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_entries_say_who_did_what_and_come_newest_first(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    assert log.read_page(AuditQuery(), 10) == Page([], None), "there is no log yet"
    log.write("ann", "job.create", "job_1", name="quick", team=None)
    log.write("bob", "auth.failed", "GET /jobs", outcome="refused")
    newest, oldest = log.read_page(AuditQuery(), 10).entries
    assert oldest | {"id": 0, "time": ""} == {
        "id": 0,
        "time": "",
        "actor": "ann",
        "action": "job.create",
        "target": "job_1",
        "outcome": "done",
        "name": "quick",
    }
    assert (newest["actor"], newest["outcome"]) == ("bob", "refused")
    assert newest["id"] > oldest["id"]
    assert datetime.fromisoformat(oldest["time"]) <= datetime.now(UTC)
    assert (log.folder / FILE).stat().st_mode & 0o777 == 0o600


def test_a_page_goes_on_where_the_page_before_ended(tmp_path: Path) -> None:
    log = make_log(tmp_path, audit_bytes=4096, audit_files=20)
    for number in range(100):
        log.write("ann" if number % 3 else "bob", f"job.{'cancel' if number % 2 else 'create'}",
                  f"job_{number}")  # fmt: skip
    assert len(list(log.folder.glob(f"{FILE}*"))) > 2, "several files"
    order = [f"job_{number}" for number in reversed(range(100))]
    for size in (1, 7, 100, 1000):
        assert [entry["target"] for entry in everything(log, size=size)] == order
    wanted = AuditQuery(actor="bob", action="job.create")
    assert [entry["target"] for entry in everything(log, wanted, 3)] == [
        f"job_{number}" for number in reversed(range(0, 100, 6))
    ]
    assert len(everything(log, AuditQuery(action="job"))) == 100
    assert everything(log, AuditQuery(action="jo")) == []
    assert [entry["target"] for entry in everything(log, AuditQuery(target="job_7"))] == ["job_7"]
    moments = [datetime.fromisoformat(entry["time"]) for entry in everything(log)]
    between = AuditQuery(after=moments[60], before=moments[50])
    assert [entry["target"] for entry in everything(log, between)] == order[51:60]
    # An entry that comes meanwhile moves no page.
    first = log.read_page(AuditQuery(), 10)
    log.write("ann", "job.create", "late")
    second = log.read_page(AuditQuery(), 10, first.next_cursor)
    assert [entry["target"] for entry in second.entries] == order[10:20]


def test_a_rare_actor_is_found_over_several_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.audit.MAX_SCANNED", 10)
    log = make_log(tmp_path)
    for number in range(25):
        log.write("bob" if number == 2 else "ann", "job.create", f"job_{number}")
    page = log.read_page(AuditQuery(actor="bob"), 5)
    assert page.entries == []
    assert page.next_cursor is not None, "more may follow an empty page"
    assert [entry["target"] for entry in everything(log, AuditQuery(actor="bob"))] == ["job_2"]


def test_the_files_are_so_many_and_so_large(tmp_path: Path) -> None:
    log = make_log(tmp_path, audit_bytes=4096, audit_files=3)
    for number in range(300):
        log.write("ann", "job.create", f"job_{number}")
    files = sorted(log.folder.glob(f"{FILE}*"))
    assert [file.name for file in files] == [FILE, f"{FILE}.1", f"{FILE}.2"]
    assert all(file.stat().st_size <= 4096 for file in files)
    kept = [entry["target"] for entry in everything(log)]
    assert kept == [f"job_{number}" for number in reversed(range(300 - len(kept), 300))]
    fewer = make_log(tmp_path, audit_bytes=4096, audit_files=1)
    for number in range(50):
        fewer.write("ann", "job.create", f"more_{number}")
    assert [file.name for file in sorted(log.folder.glob(f"{FILE}*"))] == [FILE]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_half_a_line_is_no_entry_and_spoils_no_other(tmp_path: Path, cut: int) -> None:
    log = make_log(tmp_path)
    log.write("ann", "job.create", "job_1")
    log.write("ann", "job.create", "job_2")
    path = log.folder / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])  # a crash in the middle of the write
    assert [entry["target"] for entry in everything(log)] == ["job_1"]
    log.write("ann", "job.create", "job_3")
    # A line that lacks its end alone is known to be whole once the next entry has ended it.
    kept = ["job_3", "job_2", "job_1"] if cut == 1 else ["job_3", "job_1"]
    assert [entry["target"] for entry in everything(log)] == kept


def test_ids_grow_even_if_a_clock_goes_back(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.write("ann", "job.create", "job_1")
    path = log.folder / FILE
    entry = json.loads(path.read_bytes())
    entry["id"] += 3600 * 10**6
    path.write_text(json.dumps(entry) + "\n")
    log.write("ann", "job.create", "job_2")
    ids = [entry["id"] for entry in everything(log)]
    assert ids[0] == ids[1] + 1
    assert [entry["target"] for entry in everything(log, size=1)] == ["job_2", "job_1"]


@pytest.mark.long
def test_processes_that_write_and_die_at_once_lose_no_entry(tmp_path: Path) -> None:
    """Three write and rotate, and one is killed. Each entry that a writer was told of is there."""
    writers = {name: start_writer(tmp_path, name, 150) for name in ("a", "b")}
    victim = start_writer(tmp_path, "victim", 10**6)
    assert victim.stdout is not None
    for _ in range(40):
        told = int(victim.stdout.readline())
    victim.send_signal(signal.SIGKILL)
    rest, _ = victim.communicate()
    told = max([told, *map(int, rest.split())])
    for process in writers.values():
        process.communicate()
        assert process.returncode == 0
    log = make_log(tmp_path, audit_bytes=8192, audit_files=100)
    entries = everything(log)
    for name in writers:
        numbers = [int(entry["target"][4:]) for entry in entries if entry["actor"] == name]
        assert numbers == list(reversed(range(150)))
    killed = [int(entry["target"][4:]) for entry in entries if entry["actor"] == "victim"]
    assert killed == list(reversed(range(len(killed))))
    assert told <= len(killed) <= told + 1, "at most the entry that was being reported"
    ids = [entry["id"] for entry in entries]
    assert ids == sorted(set(ids), reverse=True)
    assert len(list(log.folder.glob(f"{FILE}*"))) > 3


def test_a_long_value_is_cut_and_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.write("ann", "auth.failed", "GET /" + "x" * 100_000)
    assert len(everything(log)[0]["target"]) == 200
    if os.getuid() != 0:
        log.folder.chmod(0o500)
        with pytest.raises(StorageError, match="audit"):
            log.write("ann", "job.create", "job_1")
        log.folder.chmod(0o700)


def test_the_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, "a", 120)
    log = make_log(tmp_path, audit_bytes=8192, audit_files=100)
    wait_until((log.folder / FILE).exists)
    seen = 0
    while writer.poll() is None:
        found = len(everything(log, size=10))
        assert found >= seen
        seen = found
        time.sleep(0.01)
    writer.communicate()
    assert len(everything(log, AuditQuery(after=datetime.now(UTC) - timedelta(hours=1)))) == 120
