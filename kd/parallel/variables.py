"""The environment variable that names devices. Imports no torch."""

#: Names the devices of a worker (docs/settings.md); "cpu,cpu" makes two devices of a CPU.
DEVICES_VARIABLE = "KD_DEVICES"
