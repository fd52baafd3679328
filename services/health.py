"""``python -m services.health api|worker``: the health check of a container. Exit code 0 = healthy."""

from __future__ import annotations

import socket
import sys

import httpx
from redis.exceptions import RedisError

from services.jobs import JobStore, connect
from services.settings import Settings


def api(settings: Settings) -> str:
    """What is wrong with this host's API, or nothing."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{settings.port}/healthz", timeout=3, trust_env=False)
    except httpx.TransportError as error:
        return f"the API does not answer: {error}"
    return "" if answer.is_success else f"the API answers {answer.status_code}"


def worker(settings: Settings) -> str:
    """What is wrong with this host's workers, or nothing: one of them must have shown a sign of life."""
    if settings.redis_url is None:
        return "KD_REDIS_URL is not set"
    try:
        workers = JobStore(connect(settings.redis_url)).workers()
    except RedisError as error:
        return f"Redis does not answer: {error}"
    host = socket.gethostname()
    return "" if any(state.host == host for state in workers) else f"no worker of {host} shows life"


def main() -> int:
    """Check what the command line names."""
    checks = {"api": api, "worker": worker}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        sys.stderr.write("usage: python -m services.health api|worker\n")
        return 2
    problem = checks[sys.argv[1]](Settings())
    sys.stderr.write(problem + "\n" if problem else "")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
