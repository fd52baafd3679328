"""What a job may say: one frozen tree, a file for each of its sections. Imports no torch."""
