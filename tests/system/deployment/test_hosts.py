"""Several hosts in network namespaces, under a few of the faults of ``make test-hosts``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from shlex import join

import pytest
import yaml

from bench.support.hosts import WORKERS, inside_network, joined_hosts, run_faults, run_gang
from bench.support.paths import ROOT
from bench.support.ranks import run_ranks
from tests.support.kd.shared_training import (
    capture_profiles,
    change,
    curve,
    evaluations,
    make_shared_job,
    train_alone,
    train_student,
)
from tests.support.kd.tiny import make_tiny_job

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux"
        or os.geteuid() != 0
        or not (shutil.which("ip") and shutil.which("tc")),
        reason="network namespaces need root on Linux, and the commands ip and tc",
    ),
]


@pytest.mark.usefixtures("_server_binary")
def test_faults_between_hosts_change_no_job(tmp_path: Path) -> None:
    said: list[str] = []
    struck, found = run_faults(tmp_path / "hosts", 8, 7, said.append)
    assert found == [], said
    assert struck["jobs"] >= 4


@pytest.mark.usefixtures("_server_binary")
def test_a_training_goes_on_after_one_of_its_hosts_is_cut_off(tmp_path: Path) -> None:
    said: list[str] = []
    found = run_gang(tmp_path / "hosts", 30, "ddp", said.append)
    assert found.attempts == 2, said
    assert found.loss < 1e-4
    assert found.student < 1e-6


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_follow_one_process_to_nine_digits_in_float64(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path, hosts: int
) -> None:
    """Of one, two and three hosts a step has 12 sequences; a host has two ranks.

    An evaluation computes its numbers in float32.
    """
    options = {"max_steps": 100, "eval_steps": 50, "save_steps": 100, "batch_size": 1}
    job = make_shared_job(tiny_teacher, tiny_text, gradient_accumulation_steps=12, **options)
    (cache,) = capture_profiles(job, tmp_path, "threshold").values()
    one = train_alone(job, cache, str(tmp_path / "one"), dtype="float64")
    assert len(curve(one)) == 100
    with joined_hosts() as net:
        names = [net.names[host] for host in WORKERS[:hosts]]
        for strategy in ("ddp", "fsdp", "hsdp"):
            shared = change(job, train={"strategy": strategy})
            given = (shared, cache, str(tmp_path / strategy), "float64")
            many, *_ = run_ranks(2 * hosts, train_student, *given, hosts=names)
            assert curve(many) == pytest.approx(curve(one), rel=1e-9)
            # The evaluation before the first step is in float32 if a process is alone.
            for other, own in zip(evaluations(many)[1:], evaluations(one)[1:], strict=True):
                assert other == pytest.approx(own, rel=1e-7)


def test_the_commands_of_the_page_train_on_two_hosts(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """They have names that lead to them, and two devices each where the page has eight."""
    page = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## One training on several hosts\n(.*?)\n## ", page, re.DOTALL)
    (fields,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (command,) = re.findall(r"```text\n(torchrun .*)\n```", section)
    body = make_tiny_job(tiny_teacher, tiny_text) | {"name": "page"}
    body |= yaml.safe_load(fields.replace("gpus: 8", "gpus: 2").replace("1000", "20"))
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(body), encoding="utf-8")
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 2")
    words = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:-1], str(job)]
    names = {"one": "a.example.org", "two": "b.example.org"}
    file = tmp_path / "hosts"
    with inside_network() as net:
        lines = [f"{net.address[host]} {name}" for host, name in names.items()]
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="utf-8")
        started = []
        for host, name in names.items():
            begin = f"hostname {name} && mount --bind {file} /etc/hosts && exec {join(words)}"
            environment = os.environ | {
                "KD_HOME": str(tmp_path / "home"),
                "KD_DEVICES": "cpu,cpu",
                "OMP_NUM_THREADS": "1",
            }
            with net.inside(host), (tmp_path / name).open("wb") as log:
                command_line = ["unshare", "--uts", "--mount", "sh", "-c", begin]
                started.append(
                    subprocess.Popen(command_line, env=environment, stdout=log, stderr=log)
                )
        codes = [each.wait(600) for each in started]
        said = [(tmp_path / name).read_text()[-3000:] for name in names.values()]
        assert codes == [0, 0], said
    assert (tmp_path / "home" / "runs" / "page" / "student" / "model.safetensors").exists()
