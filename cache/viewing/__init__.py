"""Looks at a cache of any size in seconds: a sample of its records, its shards, single records."""
