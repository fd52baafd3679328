"""Remove things after some time, by the operator's rules. Begin with ``collector.py``."""
