"""Where a run's time goes, and who else is told of its numbers."""
