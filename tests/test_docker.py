"""Dockerfile and docker-compose.yml, checked against the repository: there is no Docker engine in the tests."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.settings import STAGES, Settings

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
APPS = [name for name in SERVICES if name != "redis"]
WORKERS = [name for name in SERVICES if name.startswith("worker-")]
OTHERS_VARIABLES = {
    "HF_HOME", "HF_TOKEN", "HOME", "NVIDIA_DRIVER_CAPABILITIES", "PATH", "PIP_DISABLE_PIP_VERSION_CHECK",
    "PIP_NO_CACHE_DIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED",
}  # fmt: skip


def read_dockerfile() -> list[list[tuple[str, str]]]:
    """Its stages, each a list of (instruction, rest); continued lines are joined and comments dropped."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    stages: list[list[tuple[str, str]]] = []
    for line in filter(str.strip, re.sub(r"\\\n\s*", "", text).splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, rest.strip()))
    return stages


STAGES_OF_IMAGE = read_dockerfile()
FINAL = STAGES_OF_IMAGE[-1]
INSTRUCTIONS = [instruction for stage in STAGES_OF_IMAGE for instruction in stage]


def rests(word: str, stage: list[tuple[str, str]]) -> list[str]:
    return [rest for instruction, rest in stage if instruction == word]


def variables(stage: list[tuple[str, str]]) -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in rests("ENV", stage) for pair in shlex.split(rest))


def seconds(duration: str) -> int:
    return sum(
        int(number) * {"s": 1, "m": 60, "h": 3600}[unit] for number, unit in re.findall(r"(\d+)([smh])", duration)
    )


def run_python(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command, full = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=60)


def help_of(words: list[str]) -> subprocess.CompletedProcess[str]:
    """``kd`` with these words and ``--help``: a verb or an option that does not exist ends it with status 2."""
    module, function = PROJECT["scripts"][words[0]].split(":")
    program = f"import sys; sys.argv[0] = {words[0]!r}; from {module} import {function}; {function}()"
    return run_python(["-c", program, *words[1:], "--help"])


# The image


def test_every_stage_starts_from_the_same_python() -> None:
    bases = [rest.split()[0] for rest in rests("FROM", INSTRUCTIONS)]
    assert len(bases) > 1
    assert set(bases) == {"python:3.11-slim"}


def sources() -> list[str]:
    copies = [shlex.split(rest) for rest in rests("COPY", INSTRUCTIONS) if not rest.startswith("--from")]
    return sorted({source for copy in copies for source in copy[:-1]})


@pytest.mark.parametrize("source", sources())
def test_what_is_copied_exists_and_is_sent_to_the_builder(source: str) -> None:
    assert (ROOT / source).exists()
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line.strip("/") for line in lines if line and not line.startswith("#")]
    kept = True
    for rule in rules:  # the last rule that matches decides
        if fnmatch.fnmatch(source.strip("./"), rule.strip("!/")):
            kept = rule.startswith("!")
    assert kept


def test_the_image_holds_all_packages() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    copies = dict(shlex.split(rest)[-2:] for rest in rests("COPY", FINAL))
    assert {copies[package] for package in wheel["wheel"]["packages"]} == {"./cache", "./kd", "./services"}


def test_torch_comes_first_and_the_code_last() -> None:
    steps = [rest for _, rest in INSTRUCTIONS]
    torch = next(i for i, step in enumerate(steps) if "^torch==" in step)
    requirements = next(i for i, step in enumerate(steps) if "pip install -c constraints.txt -r" in step)
    code = next(i for i, step in enumerate(steps) if step == "kd ./kd")
    assert torch < requirements < code


def test_everything_is_installed_from_the_pins() -> None:
    installs = [part for rest in rests("RUN", INSTRUCTIONS) for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 3
    assert all("-c constraints.txt" in install or "--no-deps" in install for install in installs)
    assert any(
        line.startswith("torch==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    )


def test_the_requirements_are_what_the_dockerfile_reads() -> None:
    """Runs the image's own one-line program here."""
    (step,) = [rest for rest in rests("RUN", INSTRUCTIONS) if "tomllib" in rest]
    words = shlex.split(step.partition(" > ")[0])
    done = run_python(words[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == PROJECT["dependencies"] + PROJECT["optional-dependencies"]["gguf"]


def test_the_image_runs_as_nobody_special_under_tini() -> None:
    assert rests("USER", FINAL) == ["10001:10001"]
    assert json.loads(rests("ENTRYPOINT", FINAL)[0]) == ["/usr/bin/tini", "--"]
    assert "tini" in next(rest for rest in rests("RUN", FINAL) if "apt-get install" in rest).split()


def test_volumes_are_created_for_the_user() -> None:
    (created,) = re.findall(r"install --directory --owner=10001 --group=10001 ([^&]+)", rests("RUN", FINAL)[0])
    environment = variables(FINAL)
    assert json.loads(rests("VOLUME", FINAL)[0]) == created.split()
    assert {environment["KD_HOME"], environment["HF_HOME"]} == set(created.split())


def test_our_packages_come_before_others_of_their_name() -> None:
    assert variables(FINAL)["PYTHONPATH"] == rests("WORKDIR", FINAL)[0] == variables(FINAL)["KD_ROOT"] == "/app"


# The commands


def commands() -> list[list[str]]:
    """Every command that a container runs, its health checks included."""
    health = rests("HEALTHCHECK", FINAL)[0].partition(" CMD ")[2]
    words = [json.loads(rests("CMD", FINAL)[0]), json.loads(health)]
    for name in APPS:
        words += [SERVICES[name]["command"], SERVICES[name]["healthcheck"]["test"][1:]]
    return [list(command) for command in dict.fromkeys(map(tuple, words))]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_is_one_of_ours(command: list[str]) -> None:
    if command[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(command[2]) is not None
    else:
        done = help_of(command)
        assert done.returncode == 0, done.stderr


def test_a_command_that_does_not_exist_is_found() -> None:
    assert help_of(["kd", "wroker"]).returncode == 2
    assert help_of(["kd", "worker", "--qeues", "train"]).returncode == 2


@pytest.mark.parametrize("role", ["api", "worker"])
def test_health_of_what_does_not_run_is_bad(role: str) -> None:
    done = run_python(["-m", "services.health", role], KD_REDIS_URL="redis://127.0.0.1:1/0", KD_PORT="1")
    assert done.returncode == 1, done.stderr
    assert not re.search("Traceback|No module named", done.stderr)


def test_health_of_an_unknown_role_is_a_usage_error() -> None:
    assert run_python(["-m", "services.health", "wroker"]).returncode == 2


# The composition


def test_a_gpu_host_needs_no_profile_and_the_cpu_profile_twins_its_workers() -> None:
    default = {name for name, service in SERVICES.items() if "profiles" not in service}
    cpu = {name for name, service in SERVICES.items() if service.get("profiles") == ["cpu"]}
    assert default == {"redis", "api", "worker-precompute", "worker-train"}
    assert cpu == {"worker-precompute-cpu", "worker-train-cpu"}
    for name in cpu:
        twin = {key: value for key, value in SERVICES[name.removesuffix("-cpu")].items() if key != "deploy"}
        assert SERVICES[name] == {**twin, "profiles": ["cpu"]}


@pytest.mark.parametrize("name", ["worker-precompute", "worker-train"])
def test_a_worker_reserves_one_gpu(name: str) -> None:
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_every_stage_has_a_worker() -> None:
    for suffix in ("", "-cpu"):
        queues = [SERVICES[f"worker-{stage}{suffix}"]["command"][-2:] for stage in STAGES]
        assert queues == [["--queues", stage] for stage in STAGES]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_restarts_is_watched_and_is_not_root(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert seconds(service["stop_grace_period"]) > 0
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])


@pytest.mark.parametrize("name", WORKERS)
def test_a_stopped_worker_has_time_for_its_checkpoint(name: str) -> None:
    service = SERVICES[name]
    grace = float(service["environment"]["KD_STOP_GRACE_SECONDS"])
    assert seconds(service["stop_grace_period"]) >= grace + 10


def test_redis_keeps_what_it_is_given_and_is_not_published() -> None:
    redis, options = SERVICES["redis"], SERVICES["redis"]["command"]
    assert "ports" not in redis
    assert "network_mode" not in redis
    chosen = dict(zip(options[1::2], options[2::2], strict=True))
    assert chosen["--appendonly"] == "yes"
    assert chosen["--maxmemory-policy"] == "noeviction"
    assert redis["volumes"] == ["redis:/data"]


@pytest.mark.parametrize("name", APPS)
def test_an_app_is_the_one_image_and_waits_for_redis(name: str) -> None:
    service = SERVICES[name]
    assert (service["image"], service["build"]) == (SERVICES["api"]["image"], SERVICES["api"]["build"])
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert service["environment"]["KD_REDIS_URL"].split("/")[2] == "redis:6379"


def test_the_build_sets_an_argument_that_the_dockerfile_has() -> None:
    known = {rest.partition("=")[0] for rest in rests("ARG", INSTRUCTIONS)}
    assert set(SERVICES["api"]["build"]["args"]) == known
    assert SERVICES["api"]["build"]["context"] == "."


def test_only_the_api_is_published_and_only_on_loopback() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["api"]
    (published,) = SERVICES["api"]["ports"]
    host, _, inside = published.rpartition(":")
    assert host.startswith("127.0.0.1:")
    assert inside == SERVICES["api"]["command"][-1] == rests("EXPOSE", FINAL)[0]


@pytest.mark.parametrize("name", ["image", *APPS])
def test_every_variable_is_known_to_somebody(name: str) -> None:
    environment = variables(FINAL) if name == "image" else SERVICES[name]["environment"]
    ours = {f"KD_{field.upper()}" for field in Settings.model_fields}
    assert set(environment) - ours - OTHERS_VARIABLES == set()


def test_named_volumes_are_declared_and_used() -> None:
    mounts = {mount.partition(":")[0] for service in SERVICES.values() for mount in service["volumes"]}
    assert {mount for mount in mounts if re.fullmatch(r"\w+", mount)} == set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", APPS)
def test_mounts_lie_where_the_image_looks(name: str) -> None:
    data, models, files = (mount.rpartition("}")[2] for mount in SERVICES[name]["volumes"])
    environment = SERVICES[name]["environment"]
    assert data == f"data:{environment['KD_HOME']}"
    assert models == f"models:{environment['HF_HOME']}"
    assert files == f":{environment['KD_ROOT']}/files:ro"


def test_the_example_environment_lists_every_variable_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) == used
