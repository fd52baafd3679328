"""The fields of a job that only the service uses: when and where it runs, and who is notified."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kd.config.section import AS_BYTES, Section

JOB_ID_PATTERN = r"^job_[0-9a-z]{26}$"

Label = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$")]
HostCount = Annotated[int, Field(ge=1, le=1024)]


class Resources(Section):
    """The resources that a worker must have to run the job."""

    gpus: int | None = Field(None, ge=0, le=64)
    """Number of devices: GPUs, or the devices that KD_DEVICES=cpu,cpu makes of a CPU. null = one
    GPU if the worker has any, 0 = none. More than one train a student together (train.strategy). A
    capture uses the first one, unless its teacher is spread (teacher.parallel)."""

    hosts: HostCount | dict[Literal["min", "max"], HostCount] = 1
    """Hosts that train the student together, each a worker with `gpus` devices, or one of the hosts
    of a torchrun (python -m kd.rank). With {min: 1, max: 4} an attempt takes as many as there are,
    and begins anew from a checkpoint when more come. They need the same KD_HOME on a shared disk,
    or a bucket."""

    memory: Annotated[int, Field(ge=1, le=1 << 50), AS_BYTES] | None = None
    """Memory of each GPU, or of the host if it has none: a number of bytes, or text such as
    "16GiB". Without a GPU it is also the limit of the run, which fails with out_of_memory above it;
    with a GPU the limit is the host's memory minus a margin."""

    workers: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = 1
    """Workers that capture the cache together, on one host or on several; auto = all workers that
    are idle. Workers may join and leave while the capture runs, and the cache does not depend on
    their number. They need the same texts and models at the same paths, and the same KD_HOME on a
    shared disk, or a bucket. `kd run` uses one process. Not for a teacher that is split among
    processes (teacher.parallel fsdp or tensor)."""

    @field_validator("hosts")
    @classmethod
    def _check_range(cls, hosts: int | dict[str, int]) -> int | dict[str, int]:
        if not isinstance(hosts, int) and not (len(hosts) == 2 and hosts["min"] <= hosts["max"]):
            raise ValueError("a range of hosts is {min: 1, max: 4}, and min is not above max")
        return hosts

    @property
    def host_counts(self) -> range:
        """The numbers of hosts that may train together."""
        hosts = self.hosts
        found = (hosts, hosts) if isinstance(hosts, int) else (hosts["min"], hosts["max"])
        return range(found[0], found[1] + 1)

    @property
    def devices(self) -> int:
        """The devices that work together, on all hosts; the most."""
        return self.host_counts[-1] * (self.gpus or 1)


class Placement(Section):
    """The fields of a job that the service reads and ``kd run`` ignores."""

    labels: dict[Label, Label] = Field(default_factory=dict, max_length=16)
    """Labels to find jobs by, as name: value."""

    priority: int = Field(5, ge=0, le=9)
    """Among a team's queued jobs, the one with the highest priority starts first, and among equals
    the oldest. The priority does not change how teams share the devices."""

    depends_on: tuple[Annotated[str, Field(pattern=JOB_ID_PATTERN)], ...] = Field((), max_length=32)
    """Ids of jobs that must succeed before this job is queued."""

    deadline_seconds: int | None = Field(None, ge=1, le=31_622_400)
    """Seconds from acceptance within which the job must end, or it fails. A retry or a resume
    starts the count again."""

    max_attempts: int | None = Field(None, ge=1, le=1000)
    """Attempts that may end without a result before the job fails; null = the operator's number."""

    resources: Resources = Field(default_factory=Resources)
    """The resources that a worker must have to run the job."""

    webhook: str | None = Field(None, max_length=2048, pattern=r"^https?://[^\s]+$")
    """URL that gets a message at each change of status; the operator must allow its host."""


#: The names of the fields above, which change neither the run nor its results.
PLACEMENT_FIELDS = frozenset(Placement.model_fields)
