"""Records in units: the tables that name their tokens, and their arrays in a shard."""
