"""How a cache is written: shard by shard, each whole or not at all, and the manifest last."""
