"""The file ``state.json`` of a checkpoint, and its format. It is read without torch."""

from __future__ import annotations

from pathlib import Path

from cache.json_object import Json
from cache.manifest import verify_json
from kd.errors import TrainingError

STATE = "state.json"
#: The format of state.json; a checkpoint of another format is refused.
FORMAT = 2


def read_state(path: Path) -> Json:
    """The content of state.json; the files that it names are not read.

    Raises ``CacheCorrupt`` where it differs from its digest, and ``TrainingError`` where it is of
    another format.
    """
    content = verify_json((path / STATE).read_bytes(), STATE)
    # The first checkpoints did not say their format.
    found = int(content.get("format", 1))
    if found != FORMAT:
        newer = found > FORMAT
        raise TrainingError(
            f"{path} has checkpoint format {found}, but this version reads {FORMAT}.",
            f"Finish the run with the version that began it{' or a newer one' if newer else ''}, "
            "or delete its folder to start over.",
        )
    return content
