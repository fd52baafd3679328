"""Several processes, one on each device, that train a student or run a teacher together."""
