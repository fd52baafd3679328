"""A teacher behind a server that scores chosen ids: records of profile threshold, unbiased."""
