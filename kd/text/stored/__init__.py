"""The token store: packed text in sealed shards on the disk."""
