"""The workers, and which of them could run a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kd.client.wire.jobs import Job, JobResources
from kd.client.wire.service import WorkerState
from kd.config.kinds import SEARCH, TRAIN
from kd.files import format_bytes
from services.store.jobs.script import ScriptedStore


class Workers(ScriptedStore):
    """Keeps the list of workers."""

    def show_worker(self, state: WorkerState, ttl_seconds: int) -> None:
        """List a worker for the next ``ttl_seconds``."""
        pipeline = self.redis.pipeline()
        pipeline.set(f"kd:worker:{state.id}", state.model_dump_json(), ex=ttl_seconds)
        pipeline.sadd("kd:workers", state.id)
        pipeline.execute()

    def hide_worker(self, worker: str) -> None:
        """Take a worker that has ended off the list."""
        self.redis.delete(f"kd:worker:{worker}")
        self.redis.srem("kd:workers", worker)

    def list_workers(self) -> list[WorkerState]:
        """The workers whose last heartbeat has not expired."""
        ids = sorted(cast(set[str], self.redis.smembers("kd:workers")))
        if not ids:
            return []
        states = cast(list[str | None], self.redis.mget([f"kd:worker:{name}" for name in ids]))
        if gone := [name for name, state in zip(ids, states, strict=True) if state is None]:
            self.redis.srem("kd:workers", *gone)
        return [parse_worker(state) for state in states if state]

    def count_workers(self, stage: str) -> int:
        """The number of workers that serve a stage."""
        return sum(stage in worker.stages for worker in self.list_workers())


def parse_worker(state: str) -> WorkerState:
    """The worker that a heartbeat describes."""
    return WorkerState.model_validate_json(state)


def explain_missing_worker(job: Job, workers: Iterable[WorkerState]) -> str | None:
    """Say why no worker, idle or busy, could run a queued job; None if one could.

    Also None for a search, because an API drives it, and for a job that asks for no resources if no
    worker's memory is smaller than its models, because any worker that starts will do.
    """
    needs = job.resources
    if job.stage == SEARCH.name:
        return None
    serving = [worker for worker in workers if job.stage in worker.stages]
    # Only a training uses several hosts.
    hosts = needs.hosts if job.stage == TRAIN.name else 1
    found = sum(worker.device.covers(needs.gpus, needs.memory) for worker in serving)
    if found >= hosts or not (needs.gpus or needs.memory or hosts > 1):
        return explain_small_memory(job.least_memory, job.stage, serving)
    wanted = describe_needs(needs)
    if hosts > 1:
        return f"The job needs {hosts} workers of stage {job.stage}, and {found} fit: it waits."
    if not serving:
        return (
            f"No worker serves stage {job.stage}; the job waits until one starts that has {wanted}."
        )
    return f"No worker of stage {job.stage} has {wanted}; the job waits until one starts that has."


def explain_small_memory(
    least_memory: int | None, stage: str, serving: list[WorkerState]
) -> str | None:
    """Say that the models of a job are larger than the memory of every worker that serves a stage.

    ``least_memory`` is in bytes; None if it is unknown. The result is None if one is large enough,
    or if that cannot be known.
    """
    largest = max((worker.device.total_bytes for worker in serving), default=0)
    # Memory 0 is unknown memory.
    known = all(worker.device.total_bytes for worker in serving)
    if least_memory is None or not largest or not known or least_memory <= largest:
        return None
    return (
        f"The job's models need at least {format_bytes(least_memory)} of memory, and no worker "
        f"of stage {stage} has more than {format_bytes(largest)}: the job will run out of "
        "memory. Choose smaller models."
    )


def describe_needs(needs: JobResources) -> str:
    """The resources that a job needs in words, for example 2 GPUs with 24 GiB each."""
    memory = f"{needs.memory / 2**30:.4g} GiB" if needs.memory else ""
    if not needs.gpus:
        return f"{memory} of memory"
    gpus = "1 GPU" if needs.gpus == 1 else f"{needs.gpus} GPUs"
    each = " each" if needs.gpus > 1 else ""
    return f"{gpus} with {memory}{each}" if memory else gpus
