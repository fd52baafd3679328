"""Benches and tests share these: servers, faults, a judge of what became of jobs."""
