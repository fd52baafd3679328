"""Every path and hub id that a job names."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cache.errors import StoreError
from cache.json_object import Json
from cache.remote.address import StoreAddress
from kd.addresses import HUB_ID, ModelSource
from kd.buckets.inputs import is_stored_name
from kd.config.job import JobConfig
from kd.errors import Problem


@dataclass(frozen=True)
class NamedResource:
    """A path or a hub id in a job; ``pointer`` is the JSON pointer to its field.

    ``file`` is the one file with the weights of a model, and ``own_code`` asks for its own code.
    """

    pointer: str
    name: str
    kind: Literal["model", "text", "dataset", "task"]
    revision: str | None = None
    file: str | None = None
    own_code: bool = False


def list_named_resources(config: JobConfig) -> Iterator[NamedResource]:
    """Yield every path and hub id in ``config``."""
    for pointer, section in config.named_teachers.items():
        teacher, proposer = section.files, section.proposer
        yield NamedResource(
            point_at_teacher(teacher, pointer),
            teacher.name,
            "model",
            teacher.revision,
            teacher.gguf_file,
            teacher.trust_remote_code,
        )
        if proposer is not None:
            code = proposer.trust_remote_code
            yield NamedResource(f"{pointer}/proposal", proposer.model, "model", own_code=code)
    student = config.student
    if student is not None and student.model is not None:
        yield NamedResource("/student/model", student.model, "model", student.revision)
    if student is not None and student.init is not None and student.init.tokenizer is not None:
        yield NamedResource("/student/init/tokenizer", student.init.tokenizer, "model")
    space = config.search.space if config.search is not None else {}
    # A trial's student keeps the job's revision; a tokenizer has none.
    revision = student.revision if student is not None else None
    for name, own in (("student.model", revision), ("student.init.tokenizer", None)):
        for choice in (space[name].choices or ()) if name in space else ():
            yield NamedResource(f"/search/space/{name}", str(choice), "model", own)
    for field, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for number, source in enumerate(sources):
            pointer = f"/data/{field}/{number}"
            if isinstance(source, str):
                yield NamedResource(pointer, source, "text")
            elif isinstance(source.leave_route(), str):
                yield NamedResource(f"{pointer}/path", source.path, "text")
            else:
                yield NamedResource(f"{pointer}/path", source.path, "dataset", source.revision)
    for number, task in enumerate(config.evaluation.tasks):
        yield NamedResource(f"/evaluation/tasks/{number}", task, "task")


def point_at_teacher(source: ModelSource, section: str = "/teacher") -> str:
    """Return the pointer to the field that names the files of a teacher, in its ``section``."""
    # A remote teacher's model is a name on its server, and only its tokenizer is read here.
    return f"{section}/model" if source.has_weights else f"{section}/tokenizer"


def find_url_problems(config: JobConfig) -> Iterator[Problem]:
    """Find URLs where a path or a hub id is expected."""
    for each in list_named_resources(config):
        scheme, mark, rest = each.name.partition("://")
        if not mark:
            continue
        if is_stored_name(each.name) and each.kind in ("model", "text"):
            try:
                StoreAddress.parse(each.name)
            except StoreError as error:
                yield Problem(each.pointer, error.detail, error.remedy)
            if each.revision is not None:
                yield Problem(
                    each.pointer,
                    f"{each.name!r} lies in a bucket, and has no revision {each.revision!r}.",
                    "Remove the revision, and give each version of a model an address of its own.",
                )
            continue
        what = "the model" if each.kind == "model" else "it"
        remedy = f"Copy {what} to this machine and give its path, or give its id on the hub."
        if scheme == "file":
            remedy = f"Write the path alone: {rest}."
        found = f"{each.name!r} is a URL, and a path or a hub id is expected."
        yield Problem(each.pointer, found, remedy)


def is_task_file(each: NamedResource) -> bool:
    """Return whether lm-eval reads a task from a file; it must know other names itself."""
    return each.name.endswith((".yaml", ".yml"))


def list_relative_paths(config: JobConfig, root: Path) -> list[NamedResource]:
    """List the names in ``config`` that mean a file or folder below ``root``.

    A name that could be one of the hub is a path only if ``root`` has it.
    """
    return [each for each in list_named_resources(config) if _is_relative_path(each, root)]


def _is_relative_path(each: NamedResource, root: Path) -> bool:
    if "://" in each.name or Path(each.name).is_absolute():
        return False
    if each.kind == "task":
        return is_task_file(each)
    if each.kind == "text" or not HUB_ID.match(each.name):
        return True
    found = resolve_links(root / each.name)
    return found is not None and found.exists()


def make_paths_absolute(config: JobConfig, root: Path) -> Json:
    """Return the JSON of ``config`` with its relative paths taken from ``root``."""
    body: Json = config.model_dump(mode="json")
    for each in list_relative_paths(config, root):
        *parents, last = each.pointer.removeprefix("/").split("/")
        holder: Any = body
        for step in parents:
            holder = holder[int(step) if isinstance(holder, list) else step]
        key: Any = int(last) if isinstance(holder, list) else last
        absolute = str(root / each.name)
        if isinstance(holder[key], dict):  # the choices of a search, which share a pointer
            choices = holder[key]["choices"]
            holder[key]["choices"] = [absolute if name == each.name else name for name in choices]
        else:
            holder[key] = absolute
    return body


def resolve_named_paths(config: JobConfig, root: Path) -> Iterator[Path]:
    """Iterate over the paths of ``config`` without links; of a pattern only the part before it."""
    named = (each for each in list_named_resources(config) if not is_stored_name(each.name))
    resolved = (resolve_links(root / find_plain_prefix(each)) for each in named)
    return (path for path in resolved if path is not None)


def find_plain_prefix(each: NamedResource) -> str:
    """Return the part of a path before its first pattern."""
    # Only text may be a glob: in other names * and ? are plain characters.
    if each.kind != "text":
        return each.name
    plain = itertools.takewhile(lambda part: not glob.has_magic(part), Path(each.name).parts)
    return str(Path(*plain))


def resolve_links(path: Path) -> Path | None:
    """Resolve ``path``; return None for a loop of links, a name too long or a forbidden byte."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None
