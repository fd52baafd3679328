"""The fields of a job: what is said of each, and those that are gone."""
