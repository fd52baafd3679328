"""The descriptors of this process: how many files and connections it may have open at once."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import deque

log = logging.getLogger(__name__)

#: More than a busy process needs: its soft limit is raised to this, if the hard limit allows.
ENOUGH = 65_536
#: Descriptors that streams leave to requests, which need one for a short time.
RESERVE = 16
#: When the log said so, in seconds of the process's clock; the last entry counts.
_told = deque([float("-inf")], maxlen=1)
REMEDY = "Raise the limit of open files of the API (ulimit -n, LimitNOFILE of systemd)."


def raise_limit() -> None:
    """Raise the soft limit of open files as far as it is useful and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def are_few_left() -> bool:
    """Whether what is left is for short requests. A new descriptor gets the lowest free number."""
    try:
        number = os.dup(2)
    except OSError as error:
        return lacks_descriptors(error)
    os.close(number)
    return number >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE


def lacks_descriptors(error: BaseException | None) -> bool:
    """Whether an error comes from there being no descriptor left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def tell_shortage() -> None:
    """Say in the log that no descriptor is left, once a minute."""
    now = time.monotonic()
    if now - _told[0] >= 60:
        _told.append(now)
        log.error("no descriptor is left for another file or connection. %s", REMEDY)


def hush(record: logging.LogRecord) -> bool:
    """Replace the tracebacks of errors that come from the shortage by its one line.

    The event loop alone reports some thousand a second: one for each connection that might wait. It
    begins to accept again as often, and fails as often where the server has closed meanwhile.
    """
    if record.exc_info and lacks_descriptors(record.exc_info[1]):
        tell_shortage()
        return False
    return record.name != "asyncio" or "_start_serving" not in record.getMessage()
