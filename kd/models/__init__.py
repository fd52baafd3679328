"""Models: what a folder says, loading, the LM head, precision, and the saved student."""
