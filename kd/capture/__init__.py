"""Capture: the teacher reads the text once, and its records are sealed in a cache."""
