"""Several sources as one: the parts of a job with several teachers."""
