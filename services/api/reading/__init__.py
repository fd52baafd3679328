"""Reads caches for the API, in a process of its own."""
