"""One worker that helps with the capture of a job which another worker holds.

It takes ranges of shards from the table (``services.store.ranges``) and captures them in a child of
its own. What it cannot do ends its help, and not the job.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.kinds import CAPTURE
from kd.errors import OtherCapture
from kd.files import HELPERS
from kd.python.version import read_version
from services.settings import Settings
from services.store.jobs.store import JobStore
from services.store.ranges import HelpOrder, RangeTable
from services.worker.devices import WorkerDevice
from services.worker.failures import Failure, describe_error
from services.worker.memory_limit import choose_limit_bytes
from services.worker.range_server import RangeServer, find_place
from services.worker.stage_child import EXIT_PASSING
from services.worker.stage_process import start_child
from services.worker.supervisor import Instruction, describe_end, has_stopped, supervise

#: The work of the child, as errors name it.
WHERE = f"a helper of stage {CAPTURE.name}"

log = logging.getLogger("potstill.worker")


@dataclass(frozen=True, eq=False)
class CaptureHelp:
    """Supervises the child that helps, until no range is left or the capture stops."""

    _store: JobStore
    _settings: Settings
    _order: HelpOrder
    _worker: str
    _device: WorkerDevice
    _stopping: threading.Event

    @property
    def _run_dir(self) -> Path:
        name = re.sub(r"[^A-Za-z0-9.-]", "-", self._worker)
        return self._settings.run_dir(self._order.member.id) / HELPERS / name

    def run(self) -> None:
        """Help to the end. A failure is a warning of the job, and this worker helps no more."""
        table = RangeTable(self._store.redis)
        server = RangeServer(table, self._settings.lease_seconds, self._order.member)
        try:
            with server:
                warning = self._supervise(server)
        except RedisError as error:
            log.warning("the help ends: %s", type(error).__name__)
            return
        server.leave(warning)
        log.info("the help with %s ends: %s", self._order.member.id, warning or "as it should")

    def _supervise(self, server: RangeServer) -> str:
        """Run the child; return the warning that the job gets, or nothing."""
        order = self._order
        try:
            config = self._read_config()
            job, terms = order.claim, order.terms
            child = start_child(
                self._store, self._settings, self._device, job, self._run_dir, server, terms
            )
        except (PotstillError, OSError) as error:
            return self._describe_failure(describe_error(error))
        limit = choose_limit_bytes(config.resources, self._device)

        def instruct() -> Instruction:
            return "stop" if self._stopping.is_set() or server.reply != "go" else "go"

        with child:
            supervise(child, self._settings, limit, instruct)
        if child.process.returncode in (0, EXIT_PASSING) or has_stopped(child):
            return ""
        failure = child.error
        if failure is None or child.kill_reason == "memory":
            failure = describe_end(child, WHERE, self._settings, limit, self._run_dir)
        return self._describe_failure(failure)

    def _read_config(self) -> JobConfig:
        """Return the job's config. Raises ``OtherCapture`` if this worker cannot help.

        The version is compared first, because a job of another version may not be readable here.
        """
        theirs = self._order.terms
        own_version = read_version()
        if own_version != theirs.version:
            raise OtherCapture(
                f"It runs Potstill {own_version}, and the worker that leads the capture "
                f"{theirs.version}.",
                "Install the same version on all workers.",
            )
        config = parse_config(self._order.claim.config)
        own_place = find_place(self._settings, config)
        if own_place != theirs.place:
            raise OtherCapture(
                f"Its caches are in {own_place}, and the caches of the worker that leads the "
                f"capture are in {theirs.place}.",
                "Give all workers one bucket (KD_STORE), or the same KD_HOME on a shared disk.",
            )
        return config

    def _describe_failure(self, failure: Failure) -> str:
        what = f"{failure['detail']} {failure.get('remedy', '')}".strip()
        return f"Worker {self._worker} no longer helps with this capture: {what}"
