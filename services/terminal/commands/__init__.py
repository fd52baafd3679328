"""The commands of ``kd``, one module for each subject."""
