"""The shards of a cache: their entries, and which of them are missing."""
