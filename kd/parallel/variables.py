"""The environment variable that names devices. Imports no torch."""

#: Names the devices of a worker (docs/settings.md); "cpu,cpu" makes two devices of a CPU.
DEVICES_VARIABLE = "KD_DEVICES"
#: The name of a CPU among them.
CPU = "cpu"


def split_names(text: str) -> list[str]:
    """Split a list of names at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
