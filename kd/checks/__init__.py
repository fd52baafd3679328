"""Checks that a careful engineer makes by hand, each a function that returns a verdict."""
