"""What is removed after some time, by the operator's rules. Begin with ``collection.py``."""
