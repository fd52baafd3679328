"""Text: read, tokenised, packed, and cut into batches."""
