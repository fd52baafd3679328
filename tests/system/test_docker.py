"""Dockerfile and docker-compose.yml against the repository.

The tests need no Docker engine: they read both files. ``test_containers.py`` runs their commands.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from kd.config.kinds import list_stage_names
from services.settings import Settings
from tests.support.images import (
    COMPOSE,
    EXTRAS,
    INSTRUCTIONS,
    PROJECT,
    SERVICES,
    STAGES_OF_IMAGE,
    requirements,
    rests,
    run_python,
    seconds,
    variables,
    whole,
)

#: Services whose containers do one thing and end.
ONCE = ["setup", "tools"]
OURS = [name for name in SERVICES if name != "redis"]
APPS = ["api", "worker", "worker-cpu"]
WORKERS = ["worker", "worker-cpu"]
#: Credentials of buckets, which their library reads from variables alone.
OF_BUCKETS = {
    "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
}  # fmt: skip
OTHERS_VARIABLES = OF_BUCKETS | {
    "HF_HOME", "HF_TOKEN", "HOME", "KD_TEACHER_KEY", "MLFLOW_TRACKING_URI",
    "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "PATH", "PIP_DISABLE_PIP_VERSION_CHECK",
    "PIP_NO_CACHE_DIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED",
    "WANDB_API_KEY",
}  # fmt: skip


TARGETS = ["api", "worker"]


def run_help(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``kd`` with these words and ``--help``; an unknown verb or option gives status 2."""
    module, function = PROJECT["scripts"][words[0]].split(":")
    program = (
        f"import sys; sys.argv[0] = {words[0]!r}; from {module} import {function}; {function}()"
    )
    return run_python(["-c", program, *words[1:], "--help"])


# ---------------------------------------------------------------------- the images


def test_every_stage_starts_from_the_same_python() -> None:
    bases = {rest.split()[0] for rest in rests("FROM", INSTRUCTIONS)} - set(STAGES_OF_IMAGE)
    assert bases == {"python:3.11-slim", "scratch"}
    assert [
        stage
        for stage in STAGES_OF_IMAGE
        if rests("FROM", STAGES_OF_IMAGE[stage])[0] == "scratch AS code"
    ]


def sources() -> list[str]:
    copies = [
        shlex.split(rest) for rest in rests("COPY", INSTRUCTIONS) if not rest.startswith("--from")
    ]
    return sorted({source for copy in copies for source in copy[:-1]})


@pytest.mark.parametrize("source", sources())
def test_copied_files_exist_and_are_sent_to_the_builder(source: str) -> None:
    assert (ROOT / source).exists()
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line.strip("/") for line in lines if line and not line.startswith("#")]
    kept = True
    path = Path(source.strip("./"))
    for rule in rules:  # the last rule that matches decides; that of a folder holds for its files
        if any(fnmatch.fnmatch(str(part), rule.strip("!/")) for part in (path, *path.parents[:-1])):
            kept = rule.startswith("!")
    assert kept


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_all_packages_and_copies_from_stages_that_exist(target: str) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
        "build"
    ]["targets"]
    copies = dict(shlex.split(rest)[-2:] for rest in rests("COPY", STAGES_OF_IMAGE["code"]))
    assert {copies[package] for package in wheel["wheel"]["packages"]} == {
        "/app/cache",
        "/app/kd",
        "/app/services",
    }
    copied = [shlex.split(rest) for rest in rests("COPY", STAGES_OF_IMAGE[target])]
    assert copied == [
        [f"--from={target}-packages", "/opt/venv", "/opt/venv"],
        ["--from=code", "/app", "/app"],
    ]
    assert f"{target}-packages" in STAGES_OF_IMAGE


@pytest.mark.parametrize("target", TARGETS)
def test_the_build_of_the_metadata_finds_every_file_that_belongs_to_a_wheel(target: str) -> None:
    """An editable install reads them too, and fails without them."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    wanted = tools["hatch"]["build"]["targets"]["wheel"]["force-include"]
    copied = [
        source
        for rest in rests("COPY", whole(f"{target}-packages"))
        for source in rest.split()[:-1]
    ]
    missing = [
        file for file in wanted if not any(Path(file).is_relative_to(path) for path in copied)
    ]
    assert missing == []


def test_torch_comes_first_and_the_code_last() -> None:
    steps = [rest for _, rest in whole("worker-packages")]
    torch = next(i for i, step in enumerate(steps) if "^torch==" in step)
    project = next(i for i, step in enumerate(steps) if step.startswith("pyproject.toml"))
    requirements = next(
        i for i, step in enumerate(steps) if "pip install -c constraints.txt -r" in step
    )
    assert torch < project < requirements
    assert rests("COPY", STAGES_OF_IMAGE["worker"])[-1].startswith("--from=code")


def install_torch(**arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the step that installs torch, with a ``pip`` that prints its arguments."""
    (step,) = [
        rest for rest in rests("RUN", STAGES_OF_IMAGE["worker-packages"]) if "^torch==" in rest
    ]
    return subprocess.run(
        ["sh", "-ec", f'pip() {{ echo "$@"; }}; {step}'],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]} | arguments,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("cuda", "index", "expected"),
    [
        ("13", "", None),
        ("12", "", "https://download.pytorch.org/whl/cu126"),
        ("13", "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cpu"),
        ("12", "https://mirror.example.org/cu126", "https://mirror.example.org/cu126"),
    ],
)
def test_the_build_argument_picks_the_build_of_torch(
    cuda: str, index: str, expected: str | None
) -> None:
    done = install_torch(CUDA=cuda, TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
        if line.startswith("torch==")
    )
    extra = f"--extra-index-url {expected} " if expected else ""
    assert done.stdout == f"install -c constraints.txt {extra}{torch}\n"


def test_an_unknown_cuda_ends_the_build() -> None:
    done = install_torch(CUDA="12.6", TORCH_INDEX="")
    assert done.returncode == 1
    assert done.stderr == "CUDA is '12.6'; expected 13 or 12\n"


def test_the_image_of_the_worker_states_the_driver_that_it_needs() -> None:
    stage = STAGES_OF_IMAGE["worker"]
    assert variables(stage)["NVIDIA_REQUIRE_CUDA"] == "cuda>=${CUDA}.0"
    # The same default in both stages and in the composition.
    assert "CUDA=13" in rests("ARG", stage)
    assert "CUDA=13" in rests("ARG", STAGES_OF_IMAGE["worker-packages"])
    assert SERVICES["worker"]["build"]["args"]["CUDA"] == "${CUDA:-13}"
    assert "NVIDIA_REQUIRE_CUDA" not in variables(whole("api"))


def test_everything_is_installed_from_the_pins() -> None:
    installs = [
        part
        for rest in rests("RUN", INSTRUCTIONS)
        for part in rest.split("&&")
        if "pip install" in part
    ]
    assert len(installs) == 5
    assert all("-c constraints.txt" in install or "--no-deps" in install for install in installs)
    assert any(
        line.startswith("torch==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    )


def test_the_requirements_are_what_the_dockerfile_reads() -> None:
    assert requirements("api") == PROJECT["dependencies"] + EXTRAS["obstore"]
    assert requirements("worker") == requirements("api") + EXTRAS["worker"] + EXTRAS["gguf"]
    assert (
        requirements("worker", EXTRAS="track,eval")
        == requirements("worker") + EXTRAS["track"] + EXTRAS["eval"]
    )


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_an_unprivileged_user_under_tini(target: str) -> None:
    stage = whole(target)
    assert rests("USER", stage)[-1] == "10001:10001"
    assert [json.loads(rest) for rest in rests("ENTRYPOINT", stage)] == [["/usr/bin/tini", "--"]]
    assert "tini" in next(rest for rest in rests("RUN", stage) if "apt-get install" in rest).split()
    assert rests("STOPSIGNAL", stage) == ["SIGTERM"]


def test_volumes_are_created_for_the_user() -> None:
    (created,) = re.findall(
        r"install --directory --owner=10001 --group=10001 ([^&]+)", rests("RUN", whole("api"))[0]
    )
    environment = variables(whole("api"))
    assert set(json.loads(rests("VOLUME", whole("api"))[0])) == {
        environment["KD_HOME"],
        environment["HF_HOME"],
    }
    mounted = {
        mount.split(":")[1]
        for name in OURS
        for mount in SERVICES[name]["volumes"]
        if mount[0] not in "$."
    }
    assert mounted == set(created.split())


def test_our_packages_come_before_others_of_their_name() -> None:
    environment = variables(whole("api"))
    assert (
        environment["PYTHONPATH"]
        == rests("WORKDIR", whole("api"))[-1]
        == environment["KD_ROOT"]
        == "/app"
    )


# ---------------------------------------------------------------------- the commands


def commands() -> list[list[str]]:
    """Every command that a container runs, including its health checks."""
    words = []
    for target in TARGETS:
        stage = STAGES_OF_IMAGE[target]
        words += [
            json.loads(rests("CMD", stage)[0]),
            json.loads(rests("HEALTHCHECK", stage)[0].partition(" CMD ")[2]),
        ]
    for name in APPS:
        words += [SERVICES[name]["command"], SERVICES[name]["healthcheck"]["test"][1:]]
    tools = SERVICES["tools"]["entrypoint"][2:]
    words += [tools, *([*tools, verb] for verb in ("keys", "backup", "restore"))]
    return [list(command) for command in dict.fromkeys(map(tuple, words))]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_is_one_of_ours(command: list[str]) -> None:
    if command[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(command[2]) is not None
    else:
        done = run_help(command)
        assert done.returncode == 0, done.stderr


def test_a_command_that_does_not_exist_is_found() -> None:
    assert run_help(["kd", "wroker"]).returncode == 2
    assert run_help(["kd", "worker", "--qeues", "train"]).returncode == 2


@pytest.mark.parametrize("target", TARGETS)
def test_a_service_has_the_command_and_the_health_check_of_its_image(target: str) -> None:
    stage = STAGES_OF_IMAGE[target]
    service = SERVICES[target]
    assert json.loads(rests("CMD", stage)[0]) == service["command"]
    options, _, command = rests("HEALTHCHECK", stage)[0].partition(" CMD ")
    check = service["healthcheck"]
    assert json.loads(command) == check["test"][1:]
    given = dict(option.removeprefix("--").split("=") for option in options.split())
    assert given == {
        name.replace("_", "-"): str(value) for name, value in check.items() if name != "test"
    }


@pytest.mark.long
@pytest.mark.parametrize("role", TARGETS)
def test_a_process_that_does_not_run_is_unhealthy(role: str) -> None:
    done = run_python(
        ["-m", "services.process.health", role], KD_REDIS_URL="redis://127.0.0.1:1/0", KD_PORT="1"
    )
    assert done.returncode == 1, done.stderr
    assert not re.search("Traceback|No module named", done.stderr)


@pytest.mark.long
def test_health_of_an_unknown_role_is_a_usage_error() -> None:
    assert run_python(["-m", "services.process.health", "wroker"]).returncode == 2


# ---------------------------------------------------------------------- the composition


def test_a_gpu_host_needs_no_profile_and_the_cpu_profile_twins_its_worker() -> None:
    default = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert default == {"setup", "redis", "api", "worker"}
    assert {
        name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service
    } == {
        "worker-cpu": ["cpu"],
        "tools": ["tools"],
    }
    twin = {key: value for key, value in SERVICES["worker"].items() if key != "deploy"}
    assert SERVICES["worker-cpu"] == {**twin, "profiles": ["cpu"]}


def test_the_worker_is_shown_every_gpu_and_may_be_scaled() -> None:
    (device,) = SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert not {"container_name", "ports", "hostname"} & set(SERVICES["worker"])


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_serves_every_stage(name: str) -> None:
    assert SERVICES[name]["command"][-2:] == ["--queues", ",".join(list_stage_names("worker"))]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_not_root_and_can_write_to_its_volumes_alone(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["read_only"] is True
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert (
        not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & set(service)
        or name == "setup"
    )


@pytest.mark.parametrize("name", SERVICES)
def test_long_running_services_restart_and_have_health_checks(name: str) -> None:
    service = SERVICES[name]
    if name in ONCE:
        assert (service["restart"], service["healthcheck"]) == ("no", {"disable": True})
        return
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert seconds(service["stop_grace_period"]) > 0
    assert seconds(service["healthcheck"]["timeout"]) <= seconds(service["healthcheck"]["interval"])


@pytest.mark.parametrize("name", WORKERS)
def test_a_stopped_worker_has_time_for_its_checkpoint(name: str) -> None:
    service = SERVICES[name]
    grace = float(service["environment"]["KD_STOP_GRACE_SECONDS"])
    assert seconds(service["stop_grace_period"]) >= grace + 10


def test_nothing_but_the_api_is_published_and_that_only_on_loopback() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["api"]
    (published,) = SERVICES["api"]["ports"]
    host, _, inside = published.rpartition(":")
    assert host.startswith("127.0.0.1:")
    assert inside == SERVICES["api"]["command"][-1] == rests("EXPOSE", STAGES_OF_IMAGE["api"])[0]
    assert not rests("EXPOSE", whole("worker"))


@pytest.mark.parametrize("name", APPS)
def test_an_app_is_its_image_and_waits_for_redis(name: str) -> None:
    service = SERVICES[name]
    target = name.removesuffix("-cpu")
    assert service["image"].startswith(f"potstill-{target}:")
    assert service["build"]["target"] == target
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert service["environment"]["KD_REDIS_URL"] == "redis://redis:6379/0"


def test_redis_waits_for_its_password() -> None:
    assert SERVICES["redis"]["depends_on"] == {
        "setup": {"condition": "service_completed_successfully"}
    }
    named = {SERVICES[name]["environment"]["KD_REDIS_PASSWORD_FILE"] for name in SERVICES}
    assert named == {"/secrets/redis_password"}


def test_each_service_mounts_only_the_volumes_that_it_needs() -> None:
    """A worker, whose jobs may run foreign code, cannot see the API's keys."""
    mounts = {
        name: dict(_volume(mount) for mount in service["volumes"])
        for name, service in SERVICES.items()
    }
    assert {
        name: mounts[name].get("secrets")
        for name in SERVICES
        if mounts[name].get("secrets") != "ro"
    } == {"setup": "rw"}
    assert {name: mounts[name]["keys"] for name in SERVICES if "keys" in mounts[name]} == {
        "api": "ro",
        "tools": "rw",
    }
    assert [name for name in SERVICES if "redis" in mounts[name]] == ["redis"]
    assert [name for name in SERVICES if "data" in mounts[name]] == [
        "api",
        "worker",
        "worker-cpu",
        "tools",
    ]


def _volume(mount: str) -> tuple[str, str]:
    name, *rest = re.sub(r"\$\{(\w+)[^}]*\}", r"\1", mount).split(":")
    return name, rest[1] if len(rest) > 1 else "rw"


@pytest.mark.parametrize("target", TARGETS)
def test_the_build_sets_every_argument_of_the_dockerfile(target: str) -> None:
    known = {rest.partition("=")[0] for rest in rests("ARG", whole(f"{target}-packages"))}
    assert set(SERVICES[target]["build"].get("args", {})) == known
    assert SERVICES[target]["build"]["context"] == "."


@pytest.mark.parametrize("name", ["image", *OURS])
def test_every_variable_is_known(name: str) -> None:
    environment = variables(whole("worker")) if name == "image" else SERVICES[name]["environment"]
    ours = {f"KD_{setting.upper()}" for setting in Settings.model_fields}
    assert set(environment) - ours - OTHERS_VARIABLES == set()


def test_no_secret_is_in_the_environment_or_on_a_command_line() -> None:
    """Variables name the files of secrets; some libraries read theirs from variables alone."""
    text = json.dumps(
        {name: {**service, "healthcheck": None} for name, service in SERVICES.items()}
    )
    named = set(re.findall(r"\w*(?:PASSWORD|SECRET|TOKEN|KEY)\w*", text))
    assert {name for name in named if not re.search(r"_FILE$|_KEYS_FILE$", name)} == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "HF_TOKEN",
        "KD_TEACHER_KEY",
        "WANDB_API_KEY",
    }


def test_named_volumes_are_declared_and_used() -> None:
    mounts = {
        mount.partition(":")[0] for service in SERVICES.values() for mount in service["volumes"]
    }
    assert {mount for mount in mounts if re.fullmatch(r"\w+", mount)} == set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", APPS)
def test_mounts_lie_where_the_image_looks(name: str) -> None:
    environment = SERVICES[name]["environment"]
    mounts = SERVICES[name]["volumes"]
    assert f"data:{environment['KD_HOME']}" in mounts
    assert f"models:{environment['HF_HOME']}" in mounts
    assert [mount for mount in mounts if mount.endswith(f"}}:{environment['KD_ROOT']}/files:ro")]
    assert "/app/files" in next(
        rest for rest in rests("RUN", whole("api")) if "install --directory" in rest
    )


def test_the_example_environment_lists_every_variable_with_its_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    set_here = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert set_here == dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    off = dict(line[1:].split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))
    passed_on = {
        name
        for service in SERVICES.values()
        for name, value in service["environment"].items()
        if not value
    }
    assert set(off) == passed_on - {"HF_TOKEN"}


@pytest.mark.long
def test_the_example_environment_can_be_uncommented() -> None:
    """Each commented line parses, and its value is the default, unless it is an example."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    off = dict(line[1:].split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))
    examples = {"KD_MODEL_ALLOW_LIST", "KD_WEBHOOK_SECRET_FILE"}
    program = "import sys; from services.settings import Settings; "
    program += "sys.stdout.write(Settings().model_dump_json())"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KD_")}
    outputs = [
        json.loads(
            subprocess.check_output(
                [sys.executable, "-c", program], cwd=ROOT, env=plain | more, text=True
            )
        )
        for more in ({}, {name: value for name, value in off.items() if value})
    ]
    different = {
        f"KD_{name.upper()}" for name in outputs[0] if outputs[0][name] != outputs[1][name]
    }
    assert different == examples


# ---------------------------------------------------------------------- the guide

GUIDE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_guide_names_existing_settings_services_and_volumes() -> None:
    known = {f"KD_{setting.upper()}" for setting in Settings.model_fields}
    known |= set(
        re.findall(
            r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert set(re.findall(r"\bKD_[A-Z_]+\b", GUIDE)) - known == set()
    rows = {
        cell
        for row in re.findall(r"^\| (`[^|]+) \|", GUIDE, re.MULTILINE)
        for cell in re.findall(r"`(.+?)`", row)
    }
    assert rows == set(SERVICES) | set(COMPOSE["volumes"])


@pytest.mark.parametrize("line", re.findall(r"docker compose [^\n`#]+", GUIDE))
def test_the_guide_composes_existing_services(line: str) -> None:
    words = [word for word in shlex.split(line)[2:] if not word.startswith("-") and "=" not in word]
    verb = words[0]
    named = words[1:2] if words[0] == "run" else words[1:]
    assert verb in {"build", "logs", "ps", "run", "stop", "up"}
    assert set(named) <= set(SERVICES)
    if words[:2] == ["run", "tools"]:
        assert run_help(["kd", words[2]]).returncode == 0
