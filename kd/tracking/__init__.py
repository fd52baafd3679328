"""Where a run writes its numbers: metrics, trackers and times."""
