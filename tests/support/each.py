"""One test of a check of many things.

A test for each of 600 files, of each of ten rules, takes longer to collect, four times over, than
its check takes to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def for_each(
    things: Iterable[T], name: Callable[[T], str] = str
) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Turn a check of one thing into a test of all ``things``, which names those that fail."""
    known = list(things)

    def decorate(check: Callable[[T], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for thing in known:
                try:
                    check(thing)
                except AssertionError as error:
                    failures.append(f"{name(thing)}: {error}")
            if failures:
                pytest.fail("\n\n".join(failures), pytrace=False)

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
