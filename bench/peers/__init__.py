"""Our program beside the programs that a user would pick for the same task."""
