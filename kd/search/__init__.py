"""A search: many students from one cache, to find the settings that suit the job best."""
