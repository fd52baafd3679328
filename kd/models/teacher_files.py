"""A teacher with the folder of its files: what every room below the pipeline needs of a teacher.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kd.config.teacher import TeacherConfig
from kd.models.folder import find_source, resolve_source


@dataclass(frozen=True)
class TeacherFiles:
    """The section that describes a teacher, and the local folder of the files of its source.

    Where a server runs the teacher, the folder holds only its tokenizer.
    """

    section: TeacherConfig
    folder: Path

    @classmethod
    def resolve(cls, section: TeacherConfig, whole: bool = True) -> TeacherFiles:
        """Return the teacher with its folder, downloaded if it is not on this machine.

        Without ``whole`` no weights in safetensors are downloaded. Raises ``ModelError``.
        """
        return cls(section, resolve_source(section.files, whole))

    @classmethod
    def find(cls, section: TeacherConfig, root: Path) -> TeacherFiles | None:
        """Return the teacher with its folder below ``root`` or in the hub's cache, if it is there.

        Downloads nothing, as ``ModelFolder.find``.
        """
        found = find_source(section.files, root)
        return None if found is None else cls(section, found.path)
