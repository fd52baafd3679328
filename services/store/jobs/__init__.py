"""The job record in Redis, which is the truth about a job: one module for each of its subjects."""
