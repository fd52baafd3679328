"""The checks of a job before it runs."""
