"""Fixtures of buckets for the tests of this folder."""

from tests.support.buckets.fixtures import address, objects, reach  # noqa: F401
