"""``python -m services.process.health api|worker``: checks a container. Exit code 0 = healthy."""

from __future__ import annotations

import socket
import sys

import httpx
from redis.exceptions import RedisError

from services.settings import Settings, make_address
from services.store.connection import connect_redis, describe_failure
from services.store.jobs.store import JobStore


def check_api(settings: Settings) -> str:
    """Check this host's API. Returns the problem, or an empty text."""
    try:
        address = make_address(settings.host, settings.port)
        answer = httpx.get(f"{address}/healthz", timeout=3, trust_env=False)
    except httpx.TransportError as error:
        return f"the API does not answer: {error}"
    return "" if answer.is_success else f"the API answers {answer.status_code}"


def check_worker(settings: Settings) -> str:
    """Check that a worker of this host is alive. Returns the problem, or an empty text."""
    if settings.redis_url is None:
        return "KD_REDIS_URL is not set"
    try:
        workers = JobStore(connect_redis(settings.redis_url)).list_workers()
    except RedisError as error:
        return f"the job store {describe_failure(error)}"
    host = socket.gethostname()
    is_alive = any(state.host == host for state in workers)
    return "" if is_alive else f"no worker of {host} sends heartbeats"


def main() -> int:
    """Run the check that the command line names. Returns the exit code."""
    checks = {"api": check_api, "worker": check_worker}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        sys.stderr.write("usage: python -m services.process.health api|worker\n")
        return 2
    problem = checks[sys.argv[1]](Settings())
    sys.stderr.write(problem + "\n" if problem else "")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
