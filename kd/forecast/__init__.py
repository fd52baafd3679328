"""What a job takes before it runs: ``kd estimate``, ``kd plan`` and ``kd lr``."""
