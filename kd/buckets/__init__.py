"""Objects of a bucket beside caches: text and models that a job names, and the files of runs."""
