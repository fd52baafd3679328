"""A text that has grown: what is known of its beginning is taken from the cache before."""
