"""The stages of a job. ``kd.pipeline`` runs one after the other."""
