"""The commands about all data of a service: ``kd backup``, ``kd restore``."""
