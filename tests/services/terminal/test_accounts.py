"""``kd quota``, ``kd audit`` and the teams of ``kd keys``, against a real service."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import make_config
from bench.support.waiting import wait_until
from services.settings import Settings
from services.store.audit import AuditLog, AuditQuery
from services.store.callers import Caller, Quota
from services.store.jobs.leases import Capacity
from services.store.key_file import KeyFile, create_key, read_keys
from tests.support.commands import kd
from tests.support.services.api import serving

USER = f"os:{getpass.getuser()}"


def test_the_teams_and_their_quotas_are_kept_in_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    there = {"KD_API_KEYS_FILE": str(file), "KD_HOME": str(tmp_path / "home")}

    def ok(*words: str) -> str:
        done = kd("keys", *words, **there)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = ok("new", "ann", "--team", "nlp").strip()
    ok("new", "ann")
    ok("new", "bob")
    assert [(key.name, key.team) for key in read_keys(file)] == [
        ("ann", "nlp"),
        ("ann", "nlp"),
        ("bob", None),
    ]
    assert [key["team"] for key in json.loads(ok("ls", "--json"))] == ["nlp", "nlp", "bob"]
    other = kd("keys", "new", "ann", "--team", "vision", **there)
    assert (other.returncode, "kd keys revoke ann" in other.stderr) == (2, True)
    assert kd("keys", "new", "cal", "--team", "N L P", **there).returncode == 2

    said = ok("quota", "nlp", "--device-seconds", "7200", "--bytes", "2TiB")
    assert said == "nlp: 2 h 0 min of device time a day, 2.0 TiB on the disk\n"
    assert KeyFile(file).list_quotas() == {"nlp": Quota(7200.0, 2 << 40)}
    ok("quota", "nlp", "--bytes", "1000")
    assert KeyFile(file).list_quotas() == {"nlp": Quota(None, 1000)}
    assert "as the settings say" in ok("quota", "nlp")
    assert kd("keys", "quota", "nlp", "--bytes", "much", **there).returncode == 2
    assert kd("keys", "quota", "nlp", "--device-seconds", "0", **there).returncode == 2
    ok("revoke", "bob")

    entries = AuditLog(Settings(home=tmp_path / "home")).read_page(AuditQuery(), 100).entries
    assert {entry["actor"] for entry in entries} == {USER}
    assert [entry["action"] for entry in reversed(entries)] == [
        *["key.create"] * 3,
        *["key.quota"] * 3,
        "key.revoke",
    ]
    assert entries[-1]["team"] == "nlp"
    assert text not in json.dumps(entries)


def test_a_command_makes_no_data_folder_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KD_HOME", raising=False)
    done = kd("keys", "new", "ann", "--file", tmp_path / "keys", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.usefixtures("_server_binary")
def test_quota_and_audit_show_what_a_caller_may_see(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = {
        name: create_key(file, name, [scope], team=team)[0]
        for name, scope, team in (("ann", "write", "nlp"), ("root", "admin", None))
    }
    home = tmp_path / "home"
    home.mkdir()
    with serving(home, api_keys_file=file, quota_device_seconds=60.0) as parts:
        there = {"KD_SERVER": parts.settings.server}

        def ok(name: str, *words: str) -> Any:
            done = kd(*words, **there, KD_API_KEY=keys[name])
            assert done.returncode == 0, done.stderr
            return done

        wait_until(lambda: parts.jobs.read_accounts("nlp")[0].quota.device_seconds == 60)
        job_id = parts.jobs.create(make_config("quick"), Caller("ann", named_team="nlp")).id
        assert "COST" not in ok("ann", "jobs", "ls").stdout, "no price is set"
        claim = parts.jobs.claim(job_id, "train", "w", 60, Capacity(price=36.0))
        assert claim is not None
        parts.jobs.redis.hincrby(f"kd:job:{job_id}", "charged_at", -100_000)
        parts.jobs.finish(claim, "succeeded")
        table = ok("ann", "quota")
        assert table.stdout.split("\n")[0].split() == [
            *("TEAM", "DEVICES", "QUEUED", "RECENT", "TODAY", "OF", "ON", "DISK", "OF"),
            *("CACHES", "RUNS", "FILES"),
        ]
        assert "no limit" in table.stdout
        assert "Team nlp has used 100 of its 60 device-seconds" in table.stderr
        [account] = json.loads(ok("ann", "quota", "--json").stdout)
        assert account["device_seconds"]["used"] == pytest.approx(100, abs=1)
        assert len(json.loads(ok("root", "quota", "--json").stdout)) == 2

        listed = ok("ann", "jobs", "ls").stdout
        assert listed.split("\n")[0].split()[-1] == "COST"
        assert float(listed.split("\n")[1].split()[-1]) == pytest.approx(1, abs=0.01)
        assert "amount 1" in ok("ann", "jobs", "show", job_id).stdout

        ok("ann", "jobs", "rm", job_id)
        forbidden = kd("audit", **there, KD_API_KEY=keys["ann"])
        assert (forbidden.returncode, "scope admin" in forbidden.stderr) == (1, True)
        shown = ok("root", "audit", "--since", "1h").stdout.split("\n")
        assert shown[0].split() == ["TIME", "ACTOR", "ACTION", "TARGET", "OUTCOME", "MORE"]
        assert [line.split()[1:5] for line in shown[1:3]] == [
            ["ann", "auth.forbidden", "GET", "/audit"],
            ["ann", "job.delete", job_id, "done"],
        ]
        for wrong in ("yesterday", "9999999w"):
            refused = kd("audit", "--since", wrong, **there, KD_API_KEY=keys["root"])
            assert refused.returncode == 2
            assert f"Invalid value for --since: '{wrong}' is not an age" in refused.stderr
        found = json.loads(ok("root", "audit", "--action", "job", "--json").stdout)
        assert [(entry["actor"], entry["target"]) for entry in found] == [("ann", job_id)]
        assert len(json.loads(ok("root", "audit", "--limit", "1", "--json").stdout)) == 1
