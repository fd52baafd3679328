"""One worker that helps with the capture of a job which another worker holds.

It takes ranges of shards from the table (``services.store.ranges``) and captures them in a child of
its own. What it cannot do ends its help, and not the job.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from redis.exceptions import RedisError

from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.kinds import CAPTURE, TRAIN
from kd.errors import OtherCapture
from kd.files import HELPERS, RANKS, read_json
from kd.progress import HostPlace
from kd.python.version import read_version
from services.settings import Settings
from services.store.jobs.gangs import GangBeat, GangTable
from services.store.jobs.store import JobStore
from services.store.ranges import HelpOrder, RangeTable
from services.worker.devices import WorkerDevice
from services.worker.failures import Failure, describe_error
from services.worker.memory_limit import choose_limit_bytes
from services.worker.stage_child import EXIT_PASSING
from services.worker.stage_process import Child, start_child
from services.worker.supervisor import Instruction, describe_end, has_stopped, supervise
from services.worker.together.gang import HOSTS_FILE, GangMember, find_address, find_terms
from services.worker.together.range_server import RangeServer, find_place

#: Seconds within which a member of a gang must see what the leader has written.
SHARED_SECONDS = 30.0

log = logging.getLogger("potstill.worker")


@dataclass(frozen=True, eq=False)
class StageHelp:
    """Takes part in a stage of a job that another worker holds, in a child of its own."""

    _store: JobStore
    _settings: Settings
    _order: HelpOrder
    _worker: str
    _device: WorkerDevice
    _stopping: threading.Event

    #: The work of the child, what it is a part of, and what lies in a shared place, in messages.
    where: ClassVar[str]
    work: ClassVar[str]
    shared: ClassVar[str]

    def run(self) -> None:
        """Take part to the end. What this worker cannot do is a warning of the job."""
        raise NotImplementedError

    def find_place_name(self, config: JobConfig) -> str:
        """Return the name of what all workers must share."""
        raise NotImplementedError

    @property
    def _run_dir(self) -> Path:
        name = re.sub(r"[^A-Za-z0-9.-]", "-", self._worker)
        return self._settings.run_dir(self._order.member.id) / HELPERS / name

    def _supervise(
        self, start: Callable[[], Child | None], instruct: Callable[[], Instruction]
    ) -> str:
        """Run the child that ``start`` starts; return the warning that the job gets, or nothing."""
        try:
            config = self._read_config()
            child = start()
        except (PotstillError, OSError) as error:
            return self._describe_failure(describe_error(error))
        if child is None:
            return ""
        limit = choose_limit_bytes(config.resources, self._device)
        with child:
            supervise(child, self._settings, limit, instruct)
        if child.process.returncode in (0, EXIT_PASSING) or has_stopped(child):
            return ""
        failure = child.error
        if failure is None or child.kill_reason == "memory":
            failure = describe_end(child, self.where, self._settings, limit, self._run_dir)
        return self._describe_failure(failure)

    def _read_config(self) -> JobConfig:
        """Return the job's config. Raises ``OtherCapture`` if this worker cannot help.

        The version is compared first, because a job of another version may not be readable here.
        """
        theirs = self._order.terms
        own_version = read_version()
        if own_version != theirs.version:
            raise OtherCapture(
                f"It runs Potstill {own_version}, and the worker that leads the {self.work} "
                f"{theirs.version}.",
                "Install the same version on all workers.",
            )
        config = parse_config(self._order.claim.config)
        own_place = self.find_place_name(config)
        if own_place != theirs.place:
            raise OtherCapture(
                f"Its {self.shared} are in {own_place}, and the {self.shared} of the worker that "
                f"leads the {self.work} are in {theirs.place}.",
                "Give all workers one bucket (KD_STORE), or the same KD_HOME on a shared disk.",
            )
        return config

    def _describe_failure(self, failure: Failure) -> str:
        what = f"{failure['detail']} {failure.get('remedy', '')}".strip()
        return f"Worker {self._worker} no longer helps with this {self.work}: {what}"


class CaptureHelp(StageHelp):
    """Captures until no range is left, or until the capture stops."""

    where = f"a helper of stage {CAPTURE.name}"
    work, shared = "capture", "caches"

    def run(self) -> None:
        """Help to the end. A failure is a warning of the job, and this worker helps no more."""
        table = RangeTable(self._store.redis)
        server = RangeServer(table, self._settings.lease_seconds, self._order.member)

        def start() -> Child:
            given = (self._store, self._settings, self._device, self._order.claim, self._run_dir)
            return start_child(*given, server, self._order.terms.capture)

        def instruct() -> Instruction:
            return "stop" if self._stopping.is_set() or server.reply != "go" else "go"

        try:
            with server:
                warning = self._supervise(start, instruct)
        except RedisError as error:
            log.warning("the help ends: %s", type(error).__name__)
            return
        server.leave(warning)
        log.info("the help with %s ends: %s", self._order.member.id, warning or "as it should")

    def find_place_name(self, config: JobConfig) -> str:
        """Return the name of the store of caches."""
        return find_place(self._settings, config)


class GangHelp(StageHelp):
    """Supervises the ranks of this host, for a job that another worker leads."""

    where = f"the ranks of stage {TRAIN.name} on this host"
    work, shared = "training", "runs"

    def run(self) -> None:
        """Take part to the end. A failure ends the attempt on all hosts."""
        table = GangTable(self._store.redis)
        member = GangMember(table, self._settings.lease_seconds, self._order.member)
        with member:
            warning = self._supervise(lambda: self._start(member), lambda: self._ask(member))
        member.leave(warning)
        log.info("the part in %s ends: %s", self._order.member.id, warning or "as it should")

    def find_place_name(self, config: JobConfig) -> str:
        """Return the bucket or the folder that all hosts must share."""
        return find_terms(self._settings).place

    def _ask(self, member: GangMember) -> Instruction:
        if member.is_over:
            return "end"
        silent = member.outage_seconds > self._settings.outage_seconds
        return "stop" if silent or self._stopping.is_set() else "go"

    @property
    def _run_dir(self) -> Path:
        own = super()._run_dir
        # A run folder of its own has the name of the run: the bucket knows it by that.
        return own / self._order.member.id if self._settings.keeps_runs else own

    def _start(self, member: GangMember) -> Child | None:
        """Start the child when the ranks have their order; None if the gang does not begin."""
        while member.last.reply == "wait" and not self._stopping.wait(0.1):
            pass
        end = time.monotonic() + SHARED_SECONDS
        while member.last.reply == "go":
            place = self._find_place(member.last)
            if place is None and time.monotonic() > end:
                raise OtherCapture(
                    f"It does not see {self._shared_file}, which the leader has written.",
                    "Give all workers the same KD_HOME on a shared disk.",
                )
            if place is not None and self._is_ordered(place):
                given = (self._store, self._settings, self._device, self._order.claim)
                return start_child(*given, self._run_dir, host=place)
            if self._stopping.wait(0.1):
                break
        return None

    def _is_ordered(self, place: HostPlace) -> bool:
        """Return whether the leader has given the ranks of this gang their order."""
        if not place.run_dir:
            return True  # they get it when they meet those of the leader
        order = read_json(Path(place.run_dir) / RANKS / "order.json") or {}
        return bool(order.get("key") == place.key)

    @property
    def _shared_file(self) -> Path:
        return self._settings.run_dir(self._order.member.id) / HOSTS_FILE

    def _find_place(self, beat: GangBeat) -> HostPlace | None:
        """Return the place of this host; None until it sees what the leader has written."""
        endpoint, key = beat.detail.split()
        run_dir = ""
        if not self._settings.keeps_runs:
            content = read_json(self._shared_file) or {}
            if content.get("key") != key:
                return None
            run_dir = content["run_dir"]
        address = find_address(self._settings)
        return HostPlace(beat.number, beat.count, endpoint, key, address, run_dir)
