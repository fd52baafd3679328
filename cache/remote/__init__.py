"""Caches in a bucket: its address, its objects, and the mirror of them on this disk."""
