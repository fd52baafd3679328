"""What is known of all shards of a cache: their entries, and which of them are missing."""
