"""The configuration of a job: one frozen tree with a file per section. Imports no torch."""
