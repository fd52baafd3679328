"""Compare the models of a job with the headers of their files, before any weights are read.

A teacher in a GGUF file, or with code of its own, is compared when it is read. Imports torch where
there is a model to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kd.config.job import JobConfig
from kd.config.kinds import CAPTURE
from kd.errors import ConfigError, ModelError, Problem
from kd.models.folder import ModelFolder, resolve_model
from kd.preflight.named_paths import NamedResource, list_named_resources
from kd.progress import Monitor, Notice


def note_models(config: JobConfig, stage: str, monitor: Monitor) -> None:
    """Name what the files of a stage's models hold; ``ConfigError`` if tensors are missing.

    A model of the hub or of a bucket is downloaded, as the stage would do.
    """
    with_teacher = stage == CAPTURE.name or config.cuts_teacher or config.evaluation.teacher

    def find(each: NamedResource) -> ModelFolder:
        return ModelFolder(resolve_model(each.name, each.revision))

    if problems := list(find_tensor_problems(config, with_teacher, find, monitor.note)):
        raise ConfigError(problems)


def find_tensor_problems(
    config: JobConfig,
    with_teacher: bool,
    find: Callable[[NamedResource], ModelFolder | None],
    note: Callable[[Notice], None],
) -> Iterator[Problem]:
    """Find models whose tensors are not those of their configuration; ``find`` says where they are.

    ``note`` receives what is no problem, but worth knowing.
    """
    pointers = ["/student/model", "/search/space/student.model"]
    pointers += [f"{each}/model" for each in config.named_teachers] if with_teacher else []
    for each in list_named_resources(config):
        compared = each.pointer in pointers and not each.file and not each.own_code
        folder = find(each) if compared else None
        # Of a model of the hub, this machine may have only the small files.
        if folder is None or not folder.weight_files:
            continue
        from kd.models.loading import check_stored_model

        try:
            for notice in check_stored_model(folder.path):
                note(notice)
        except ModelError as error:
            yield Problem(each.pointer, error.detail, error.remedy)
