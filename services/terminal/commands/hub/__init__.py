"""The commands that bring results to other places: ``kd push``, ``kd pull``, ``kd export``."""
