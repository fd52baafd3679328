"""The supervisor's view of the process that runs a stage: start it, read its events, end it.

The supervisor writes a byte to its stdin in every turn. Without these bytes the process ends itself
(``services.process.stdin_guard``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cache.json_object import Json
from kd.buckets.runs import RUN_STORE_VARIABLE
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.progress import Event, HostPlace, SharedCapture
from services.process.lasting_loops import start_loop
from services.process.logs import find_secrets, redact
from services.settings import Settings
from services.store.jobs.leases import Claim, EventBatch
from services.store.jobs.store import JobStore
from services.store.tenancy import build_confinement
from services.worker.counters import RunCounters
from services.worker.stage_messages import Order, bound_event
from services.worker.together.range_server import RangeServer

if TYPE_CHECKING:  # the API, which imports this module, has no library for devices
    from services.worker.devices import WorkerDevice

#: Events in one batch at most.
BATCH_EVENTS = 500
#: Silence that a run in a loop may always have.
STEP_SECONDS = 300.0
#: Silence that a run in a loop may have, in multiples of its longest step.
STEPS_OF_SILENCE = 10
#: The least time without a byte on stdin after which a child ends itself.
LEAST_PATIENCE_SECONDS = 5.0

#: Events that tell how the child is and how it ends; a range server gets the others first.
_OWN_EVENTS = frozenset({"result", "error", "elsewhere", "alive", "shard"})
#: Variables of the worker's environment that a run may need. KD_REDIS_URL is left out because it
#: contains a password.
KEPT_VARIABLES = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | SHELL | TERM | LANG | TZ | TMPDIR | VIRTUAL_ENV
    | LD_LIBRARY_PATH | LD_PRELOAD | KD_TRUST_REMOTE_CODE
    | SSL_CERT_(FILE|DIR) | REQUESTS_CA_BUNDLE | (?i:(http|https|all|no)_proxy)
    | (WANDB|MLFLOW|TRACKIO)_\w+
    | (LC|XDG|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|DATASETS)_\w+
    | (TORCH|TORCHINDUCTOR|PYTORCH|TRITON)_\w+
    | (CUDA|CUBLAS|NVIDIA|NCCL|OMP|MKL|OPENBLAS|SLURM)_\w+
    """,
    re.VERBOSE,
)


class Outbox:
    """Events that wait for delivery. Newer progress replaces older progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Event] = deque()
        self._progress: Event | None = None
        self._sending = EventBatch(0, ())

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            if event.type == "progress":
                self._progress = event
            else:
                self._waiting.append(event)

    def next_batch(self) -> EventBatch:
        """The batch to send now. It stays the same until it is delivered."""
        with self._lock:
            if not self._sending.events:
                number = min(len(self._waiting), BATCH_EVENTS)
                events = [self._waiting.popleft() for _ in range(number)]
                if self._progress is not None:
                    events.append(self._progress)
                    self._progress = None
                self._sending = EventBatch(self._sending.number + 1, tuple(events))
            return self._sending

    def mark_delivered(self) -> None:
        """Note that the batch has arrived."""
        with self._lock:
            self._sending = EventBatch(self._sending.number, ())

    @property
    def empty(self) -> bool:
        """Whether everything was delivered."""
        with self._lock:
            return not (self._sending.events or self._waiting or self._progress)


@dataclass
class SilenceTimer:
    """The time since the last event of a run, and how long it may be silent."""

    at: float = field(default_factory=time.monotonic)
    stepping: bool = False
    longest_step: float = 0.0

    def note(self, event: Event) -> None:
        """Note that an event came."""
        now = time.monotonic()
        if self.stepping:
            self.longest_step = max(self.longest_step, now - self.at)
        if event.type in ("alive", "stage"):
            self.stepping = event.type == "alive" and event.data["stepping"]
        self.at = now

    def patience(self, silence_seconds: float) -> float:
        """Seconds of silence that the run may have.

        A run in a loop may be silent for minutes, or for ten times its longest step. Anything else
        may be silent for ``silence_seconds``.
        """
        if not self.stepping:
            return silence_seconds
        return min(silence_seconds, max(STEP_SECONDS, STEPS_OF_SILENCE * self.longest_step))

    def has_stuck(self, seconds: float) -> bool:
        """Whether a run has been silent for ``seconds``, and for ten of its steps."""
        patience = max(seconds, STEPS_OF_SILENCE * self.longest_step)
        return time.monotonic() - self.at > patience

    def is_silent(self, silence_seconds: float) -> bool:
        """Whether the run has been silent for too long."""
        return time.monotonic() - self.at > self.patience(silence_seconds)


@dataclass
class Child:
    """The process that does the work. It leads its own process group.

    ``hidden`` are words that no error and no warning of the job may show, as its log does not.
    """

    process: subprocess.Popen[bytes]
    outbox: Outbox
    hidden: tuple[str, ...] = field(default=(), repr=False)
    counters: RunCounters = field(default_factory=RunCounters)
    silence_timer: SilenceTimer = field(default_factory=SilenceTimer)
    result: Json | None = None
    error: dict[str, str] | None = None
    held_lock: Path | None = None
    server: RangeServer | None = None
    kill_at: float | None = None
    kill_reason: str = ""

    def __post_init__(self) -> None:
        # The event is never set: the loop ends with the pipe.
        self._reader = start_loop("child-events", self._read, threading.Event())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith(b"\n"):
                return  # the process was killed while it wrote the line
            parsed = json.loads(line)
            event = Event(parsed["type"], parsed["data"])
            self.silence_timer.note(event)
            self.counters.note(event)
            self._take(bound_event(event, len(line)))

    def _take(self, event: Event) -> None:
        if event.type == "warning":
            event = replace(event, data=self._hide_secrets(event.data))
        if event.type not in _OWN_EVENTS and self.server and self.server.take(event):
            return
        match event.type:
            case "result":
                self.result = event.data
            case "error":
                self.error = self._hide_secrets(event.data)
            case "elsewhere":
                self.held_lock = Path(event.data["lock"])
            case "alive" | "shard":
                pass  # only the silence timer and the counters need these
            case _:
                self.outbox.put(event)

    def hide(self, text: str) -> str:
        """Return the text with its secrets masked: a library may have put a key into an error."""
        return redact(text, self.hidden)

    def _hide_secrets(self, data: Json) -> Json:
        return {
            name: self.hide(value) if isinstance(value, str) else value
            for name, value in data.items()
        }

    def send_heartbeat(self) -> None:
        """Write a byte to the process: without these, its guard kills it."""
        assert self.process.stdin is not None
        # Nobody reads if the process has ended, or if its guard was stopped.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.process.stdin.fileno(), b".")

    def stop(self, grace_seconds: float) -> None:
        """Ask the process once to save and end. It is killed after ``grace_seconds``."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + grace_seconds
            self.process.terminate()

    def kill(self, reason: str) -> None:
        """Kill the process and everything that it has started."""
        self.kill_reason = self.kill_reason or reason
        # The group may be gone already. macOS raises PermissionError then.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process group, read the last lines, and close the pipes."""
        self.kill("end")
        self.process.wait()
        self._reader.join(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an order that was never read
                    pipe.close()


def start_child(
    store: JobStore,
    settings: Settings,
    device: WorkerDevice,
    job: Claim,
    folder: Path,
    server: RangeServer | None = None,
    shared: SharedCapture | None = None,
    host: HostPlace | None = None,
) -> Child:
    """Start the process that runs a stage in ``folder``, where log.txt is its log.

    ``server`` answers a child that captures with others, as ``shared`` says if it helps with a job
    that another worker holds. ``host`` is the place of this host, for a stage on several.
    """
    # Only the worker that holds a job has its files in the bucket, unless hosts share no folder.
    follows = host is not None and host.number > 0 and bool(host.run_dir)
    helps = shared is not None or follows
    stored_job = None if helps else job.id
    order, environment = _prepare(store, settings, device, job, folder)
    environment |= build_store_environment(settings, stored_job)
    folder.mkdir(parents=True, exist_ok=True)
    answers = () if server is None else (server.open_pipe(),)
    pipe = answers[0] if answers else None
    order = replace(order, answers=pipe, shared=shared, host=host)
    try:
        with (folder / "log.txt").open("ab") as log_file:
            process = subprocess.Popen(
                build_module_command(settings.child_module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                cwd=settings.root,
                env=build_child_environment() | environment,
                start_new_session=True,
                pass_fds=answers,
            )
    except BaseException:
        if server is not None:
            server.close_pipe()
        raise
    finally:
        for descriptor in answers:
            os.close(descriptor)
    child = Child(process, Outbox(), find_secrets(settings), server=server)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died at once; its exit code says why
        process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        process.stdin.flush()
    os.set_blocking(process.stdin.fileno(), False)
    return child


def build_child_environment() -> dict[str, str]:
    """The worker's environment without its secrets, for a child that imports the same packages.

    Progress bars of the libraries are off, because each of their steps would be a line of the log.
    """
    kept = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    return kept | {"TQDM_DISABLE": "1"} | build_package_environment()


def _prepare(
    store: JobStore, settings: Settings, device: WorkerDevice, job: Claim, folder: Path
) -> tuple[Order, dict[str, str]]:
    """Return the order for a child, and the variables that its environment needs."""
    config = parse_config(job.config)
    environment = device.build_environment(config.resources.gpus) | find_teacher_key(config)
    team = store.find_teams([job.id]).get(job.id)
    limits = build_confinement(settings, store, job.owner, team)
    order = Order(
        stage=job.stage,
        config=job.config,
        home=str(settings.home),
        run_dir=str(folder),
        # After the time of a lease the job is lost.
        patience=max(settings.lease_seconds, LEAST_PATIENCE_SECONDS),
        confinement=limits.to_order(config, settings.root),
        gpus=len(device.give(config.resources.gpus)),
        turn=job.turn,
    )
    return order, environment


def build_store_environment(settings: Settings, job_id: str | None) -> dict[str, str]:
    """Where caches and the files of a job lie, and the credentials of a bucket.

    No job can use them for another place. Without ``job_id`` the run has no files in the bucket.
    """
    place = {"KD_DOWNLOAD_BYTES": str(settings.download_bytes)}
    if settings.store is not None:
        place["KD_STORE"] = settings.store
        place["KD_STORE_CACHE_BYTES"] = str(settings.store_cache_bytes)
    if job_id is not None and (run := settings.locate_stored_run(job_id)) is not None:
        place[RUN_STORE_VARIABLE] = run
    if not settings.in_bucket and not settings.data_stores:
        return place
    return place | {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def find_teacher_key(config: JobConfig) -> dict[str, str]:
    """The API keys of the remote teachers that the job names. No other key leaves the worker."""
    names = [each.api_key_env for each in config.named_teachers.values()]
    return {name: os.environ[name] for name in names if name is not None and name in os.environ}


def build_module_command(module: str) -> list[str]:
    """The command that runs a module.

    -P keeps the working folder out of the path: it may contain a folder named ``cache`` or ``kd``.
    """
    return [sys.executable, "-P", "-m", module]


def build_package_environment() -> dict[str, str]:
    """Variables that make a subprocess import the same packages as this process."""
    return {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONUNBUFFERED": "1"}
