"""Whether the records of a cache are what the live teacher says of the text."""
