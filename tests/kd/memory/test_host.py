"""The memory of a host or a container, and the processes that the kernel killed to free memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kd.memory import host


def test_limits_and_kills_are_read_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(name: str, **files: str) -> Path:
        (tmp_path / name).mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / name / file.replace("_", ".", 1)).write_text(text)
        return tmp_path / name

    group("two", memory_max="max\n")
    group("two/inner", memory_max="1048576\n", memory_events="low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr(host, "_find_groups", lambda: [(tmp_path / "two", "inner")])
    assert host.read_memory_bytes() == 2**20
    assert host.OomKills.count().group == 2
    group("one", memory_limit_in_bytes=f"{2**60}\n", memory_oom_control="under_oom 0\noom_kill 5\n")
    monkeypatch.setattr(host, "_find_groups", lambda: [(tmp_path / "one", ".")])
    assert host.read_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.OomKills.count().group == 5


def test_the_kills_of_a_while_are_told() -> None:
    earlier = host.OomKills(1, 10)
    assert earlier.since(earlier) == ""
    assert host.OomKills(2, 11).since(earlier) == "container"
    assert host.OomKills(1, 11).since(earlier) == "host"


def test_a_path_is_seen_from_its_mount() -> None:
    assert host._make_relative("/docker/abc/inner", "/docker/abc") == "inner"
    assert host._make_relative("/", "/") == "."
    assert host._make_relative("/../other", "/") == "."


def test_this_process_s_own_groups_are_found() -> None:
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("no control groups")
    assert all(mount.is_dir() for mount, _ in host._find_groups())
    assert host.OomKills.count().host >= 0


@pytest.mark.parametrize(("bytes_of_host", "expected"), [(2**40, 2**29), (2**31, 2**28)])
def test_the_reader_s_memory_is_a_share_of_the_host_s(
    monkeypatch: pytest.MonkeyPatch, bytes_of_host: int, expected: int
) -> None:
    monkeypatch.setattr(host, "read_memory_bytes", lambda: bytes_of_host)
    assert host.choose_chunk_memory() == expected
