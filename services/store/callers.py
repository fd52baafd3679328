"""Who calls the service: the owner of a job, and the request that created it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The name of an API key, and whether it sees the jobs of all other keys."""

    name: str
    sees_all: bool = False


#: Every caller of a service that has no keys.
LOCAL_CALLER = Caller("local", sees_all=True)


@dataclass(frozen=True)
class RequestOrigin:
    """The request that created a job, as the job's logs and traces name it."""

    request_id: str = ""
    traceparent: str = ""


#: The origin of a job that no request created.
NO_ORIGIN = RequestOrigin()
