"""What benches and tests both need: servers, faults, a judge of what became of jobs."""
