"""The steps of a training: which sequences each of them has, and how they are read."""
