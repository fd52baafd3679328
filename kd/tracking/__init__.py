"""Where a run writes its numbers: metrics, trackers, times and traces."""
