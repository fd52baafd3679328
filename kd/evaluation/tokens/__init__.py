"""What student and teacher expect at single tokens of the held-out text: ``tokens.json``."""
