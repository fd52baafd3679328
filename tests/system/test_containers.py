"""The processes of the images and of the composition, started here without Docker."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis.exceptions import AuthenticationError

import services
from bench.support.harness import make_body
from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from kd.config.kinds import list_stage_names
from services.store.connection import connect_redis
from services.store.embedded import find_binary, find_free_port
from services.store.jobs.store import JobStore
from tests.support.images import HEAVY, PROJECT, SERVICES, requirements, seconds, variables, whole

# ---------------------------------------------------------------------- images


def closure(wanted: list[str]) -> set[str]:
    """Every distribution that these requirements need, including themselves."""
    found: set[str] = set()
    todo = [(Requirement(text), frozenset({""})) for text in wanted]
    while todo:
        requirement, extras = todo.pop()
        needed = not requirement.marker or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        )
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
    """A folder that every user may enter, unlike the folders of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="potstill-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def api_venv(place: Path) -> Path:
    """An environment like the API image's /opt/venv, made of links to installed distributions."""
    venv.create(place / "venv", with_pip=False, symlinks=True)
    (site,) = (place / "venv").glob("lib/python*/site-packages")
    owners = importlib.metadata.packages_distributions()
    wanted = closure(requirements("api"))
    for name in wanted:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            assert {canonicalize_name(owner) for owner in owners.get(top, [])} <= wanted, (
                f"{top} is shared"
            )
            link = site / top
            if not link.is_symlink():
                link.symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))))
    metadata = f"potstill-{importlib.metadata.version('potstill')}.dist-info"
    (site / metadata).symlink_to(
        Path(str(importlib.metadata.distribution("potstill").locate_file(metadata)))
    )
    module, function = PROJECT["scripts"]["kd"].split(":")
    script = place / "venv" / "bin" / "kd"
    program = f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    script.write_text(f"#!{place}/venv/bin/python\n{program}")
    script.chmod(0o755)
    return place / "venv"


def python_of(api_venv: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [api_venv / "bin" / "python", "-c", program]
    environment = {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_everything_but_the_worker_can_be_imported_without_torch(api_venv: Path) -> None:
    modules = [module.name for module in pkgutil.walk_packages(services.__path__, "services.")]
    light = [name for name in modules if not name.startswith("services.worker")]
    assert "services.api.app" in light
    assert "services.loops.reconciler" in light
    absent = f"assert not [name for name in {HEAVY!r} if importlib.util.find_spec(name)]"
    done = python_of(
        api_venv,
        f"import importlib.util\n{absent}\n" + "".join(f"import {name}\n" for name in light),
    )
    assert done.returncode == 0, done.stderr


def test_a_search_is_driven_without_torch(api_venv: Path) -> None:
    """The API's process asks Optuna for trials; its image has numpy, but no other heavy package."""
    program = """
from kd.config.search import SearchConfig
from kd.search.study import make_study
import optuna, sys
sampler = optuna.samplers.TPESampler(n_startup_trials=2, seed=0, multivariate=True)
study = optuna.create_study(sampler=sampler)
suggest = lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_int("n", 1, 9)
study.optimize(suggest, n_trials=8)
assert "torch" not in sys.modules
"""
    done = python_of(api_venv, program)
    assert done.returncode == 0, done.stderr


@dataclass
class Host:
    """Plays the Docker host: volumes are folders, containers are processes."""

    folder: Path
    venv: Path
    port: int = field(default_factory=find_free_port)
    redis_port: int = field(default_factory=find_free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def mount(self, name: str, uid: int = 10001, gid: int = 10001) -> None:
        """Make the folder of a volume, which belongs to the volume's user."""
        (self.folder / name).mkdir()
        if os.geteuid() == 0:
            os.chown(self.folder / name, uid, gid)

    def here(self, text: str) -> str:
        """Replace the paths and addresses in a text of the composition by those of this machine."""
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")
        text = re.sub(
            r"(?<![\w.}])/(data|models|secrets|keys|backups)\b", rf"{self.folder}/\1", text
        )
        text = re.sub(r"(?<![\w.}])/app\b", str(ROOT), text)
        return text.replace("redis:6379", f"127.0.0.1:{self.redis_port}")

    def environment(self, service: str) -> dict[str, str]:
        """The variables that image and service set, and none of this process."""
        stage = [] if service == "redis" else whole(SERVICES[service]["build"]["target"])
        named = variables(stage) | {
            k: v for k, v in SERVICES[service]["environment"].items() if v is not None
        }
        found = {name: self.here(str(value)) for name, value in named.items()}
        worker = service.startswith("worker")
        bin_folder = Path(sys.executable).parent if worker else self.venv / "bin"
        moved = {
            "HOME": f"{self.folder}/tmp",
            "PATH": f"{bin_folder}:{self.folder}/bin:/usr/local/bin:/usr/bin:/bin",
        }
        return (
            found
            | moved
            | {"KD_PORT": str(self.port), "OMP_NUM_THREADS": "1", "TMPDIR": f"{self.folder}/tmp"}
        )

    def command(self, service: str, words: list[str]) -> list[str]:
        """The command of a container, on loopback, as the container's user."""
        local = {"0.0.0.0": "127.0.0.1", "8000": str(self.port)}  # noqa: S104
        words = [local.get(word, self.here(word)) for word in words]
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            return words
        uid, gid = SERVICES[service]["user"].split(":")
        # A developer's interpreter may lie in a folder that only root can read, so one capability
        # stays: to read any file.
        kept = [f"--{which}-caps=-all,+dac_read_search" for which in ("inh", "ambient")]
        return [
            "setpriv",
            "--reuid",
            uid,
            "--regid",
            gid,
            "--clear-groups",
            *kept,
            "--no-new-privs",
            "--",
            *words,
        ]

    def run(self, service: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run one command in a container to its end."""
        command = self.command(service, words)
        environment = self.environment(service)
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    def start(self, service: str) -> subprocess.Popen[bytes]:
        """Start a container."""
        command = self.command(service, SERVICES[service]["command"])
        environment = self.environment(service)
        with (self.folder / f"{service}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.running[service] = process
        return process

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(errors="replace")

    def await_health(self, service: str) -> None:
        """Wait until the container is healthy; fails with the container's log."""
        try:
            wait_until(lambda: self.running[service].poll() is None and self.is_healthy(service))
        except AssertionError:
            pytest.fail(f"{service}: {self.log(service)[-3000:]}")

    def is_healthy(self, service: str) -> bool:
        """Whether the container's health check succeeds."""
        return self.run(service, SERVICES[service]["healthcheck"]["test"][1:]).returncode == 0

    @property
    def password(self) -> str:
        return (self.folder / "secrets" / "redis_password").read_text().strip()

    @property
    def redis_url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.redis_port}/0"

    def stop(self, service: str) -> int:
        """Stop a container as Docker does and return its exit code; too slow a stop is an error."""
        self.running[service].terminate()
        return self.running[service].wait(seconds(SERVICES[service]["stop_grace_period"]))


#: Replaces valkey-cli, which only the image has: the same requests and the same output.
CLI = """\
#!{python}
import os, socket, sys
with socket.create_connection(("127.0.0.1", {port}), 3) as connection:
    file = connection.makefile("rw", newline="\\r\\n")
    password = os.environ.get("VALKEYCLI_AUTH")
    for line in ["AUTH " + password] * (password is not None) + [sys.argv[1]]:
        file.write(line + "\\n")
        file.flush()
        answer = file.readline().strip()
print(answer.lstrip("+-"))
"""


@pytest.fixture(scope="module")
def host(place: Path, api_venv: Path) -> Iterator[Host]:
    """The composition with its volumes mounted, `setup` finished and Redis running."""
    host = Host(place, api_venv)
    for name in ("tmp", "data", "models", "secrets", "keys", "backups"):
        host.mount(name)
    host.mount("redis", *map(int, SERVICES["redis"]["user"].split(":")))
    (place / "bin").mkdir()
    server = place / "bin" / "valkey-server"
    # The last options win: they move the image's folder /data and its port 6379 to this machine.
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
    file = host.folder / "secrets" / "redis_password"
    first = host.password
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert host.run("setup", SERVICES["setup"]["command"]).returncode == 0
    assert host.password == first
    assert [path.name for path in file.parent.iterdir()] == ["redis_password"]


def test_redis_requires_the_password_and_keeps_its_data(host: Host) -> None:
    with connect_redis(host.redis_url) as client:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(512 * 2**20),
            "maxmemory-policy": "noeviction",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        pid = client.info("server")["process_id"]
    with (
        connect_redis(f"redis://127.0.0.1:{host.redis_port}/0") as stranger,
        pytest.raises(AuthenticationError),
    ):
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
    """A server that anybody may use would be worse than none."""
    empty = host.folder / "empty"
    empty.touch()
    command = [
        word.replace("$$KD_REDIS_PASSWORD_FILE", str(empty))
        for word in SERVICES["redis"]["command"]
    ]
    done = host.run("redis", command)
    assert done.returncode == 1
    assert "wrong number of arguments" in done.stdout + done.stderr


def test_redis_obeys_the_signal_of_its_container(host: Host) -> None:
    """The server replaces the shell, so that SIGTERM reaches it; its data is there afterwards."""
    with connect_redis(host.redis_url) as client:
        client.set("kd:kept", "yes")
    assert host.stop("redis") == 0
    assert not host.is_healthy("redis")
    host.start("redis")
    host.await_health("redis")
    with connect_redis(host.redis_url) as client:
        assert client.getdel("kd:kept") == "yes"


def tools(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``docker compose run --rm tools ...``."""
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
    with httpx.Client(
        base_url=f"http://127.0.0.1:{host.port}", timeout=10, trust_env=False
    ) as client:
        yield client
    assert host.stop("api") == 0
    assert not host.is_healthy("api")


def test_the_api_accepts_a_job_with_a_key_only(host: Host, api: httpx.Client, key: str) -> None:
    files = {"model": "examples/austen/teacher", "text": "examples/austen/text/persuasion.txt"}
    job = make_body(
        "first", student={"init": {"layers": 1, "hidden_size": 16, "tokenizer": files["model"]}}
    )
    job["data"] = {"train": files["text"]}
    assert api.post("/jobs", json=job).status_code == 401
    taken = api.post("/jobs", json=job, headers={"Authorization": f"Bearer {key}"})
    assert taken.status_code == 202, taken.text
    with connect_redis(host.redis_url) as client:
        assert JobStore(client).get(taken.json()["id"]) is not None
    if os.geteuid() == 0:
        assert Path(f"/proc/{host.running['api'].pid}").stat().st_uid == 10001


def test_the_api_does_not_serve_the_world_without_keys(host: Host) -> None:
    environment = {n: v for n, v in host.environment("api").items() if n != "KD_API_KEYS_FILE"}
    words = host.command("api", ["kd", "serve"])
    done = subprocess.run(
        [*words, "--host", "0.0.0.0", "--port", str(find_free_port())],  # noqa: S104
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 2
    assert "KD_API_KEYS_FILE" in done.stderr


@pytest.mark.long
def test_a_worker_registers_and_ends_in_time(host: Host) -> None:
    host.start("worker-cpu")
    host.await_health("worker-cpu")
    with connect_redis(host.redis_url) as client:
        (state,) = JobStore(client).list_workers()
    assert set(state.stages) == set(list_stage_names("worker"))
    assert host.stop("worker-cpu") == 0
    assert not host.is_healthy("worker-cpu")


@pytest.mark.long
def test_the_tools_back_up_the_volumes_and_restore_them(host: Host, key: str) -> None:
    (host.folder / "data" / "runs").mkdir(exist_ok=True)
    host.mount("data/runs/job_x")
    log = host.folder / "data" / "runs" / "job_x" / "log.txt"
    log.write_text("a line\n")
    if os.geteuid() == 0:  # a worker has made the runs
        os.chown(host.folder / "data" / "runs", 10001, 10001)
    name = f"/backups/{secrets.token_hex(4)}"
    done = tools(host, "backup", name)
    assert done.returncode == 0, done.stderr
    with connect_redis(host.redis_url) as client:
        before = sorted(client.keys("kd:job:*"))
        client.flushall()
    shutil.rmtree(log.parent)
    done = tools(host, "restore", name)
    assert done.returncode == 1, "the keys are still there"
    done = tools(host, "restore", name, "--force")
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "a line\n"
    with connect_redis(host.redis_url) as client:
        assert sorted(client.keys("kd:job:*")) == before
    assert sum(" me " in line for line in tools(host, "keys", "ls").stdout.splitlines()) == 1
