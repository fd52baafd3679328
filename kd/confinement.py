"""What a job of the service may name: folders, models, hosts. ``kd run`` is free, and gives no ``Confinement``.

    a path    must resolve, links included, into one of ``roots``, and neither be hidden there nor one of ``denied``
    in home   only run folders and caches that the job's owner may read: the rest is the service's own
    a model   must stand on the operator's list, where there is one
    a URL     must name one of ``hosts``, and that host a public address, or one that the list names literally
    a dataset must hold its own files: what its card names elsewhere is not read (dataset_files.py)

Asked at POST, and again where a stage begins: a link may have been turned in between. Imports no torch.
"""

from __future__ import annotations

import glob
import ipaddress
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from cache.errors import StorageError
from kd.config.data import DatasetSpec
from kd.config.job import JobConfig
from kd.data import datasets_opened_by, find_files
from kd.dataset_files import Reason, folder_reason, open_confined
from kd.errors import ConfigError, Problem

#: What ``datasets`` reads by a builder of its own, from files that it looks for itself; one of them reads pickles.
BUILDERS = {
    "arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor", "hdf5", "iceberg",
    "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder", "pandas", "parquet", "pdb", "pdffolder",
    "text", "tsfile", "videofolder", "vortex", "webdataset", "xml",
}  # fmt: skip
#: Look public and are not: what clouds answer on for their own machines, and what is reserved for protocols.
_SPECIAL = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24")))
_LOOPBACK = ("127.0.0.0/8", "::1/128")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def nothing(_: str) -> bool:
    """A predicate that grants nothing."""
    return False


@dataclass(frozen=True)
class AllowedModel:
    """A line of the operator's list: a hub id or a folder, of one revision or of any."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Confinement:
    """The folders, models and hosts that a job may name; every path in it is absolute and free of links.

    ``models`` None = any that is found. ``remote_code``: whether the operator lets jobs run code that comes with a
    model or task. ``free_datasets``: whether a dataset may take in files from anywhere. ``may_read_run`` and
    ``may_read_cache`` say of a job's id and of a fingerprint whether the job's owner may read that folder of ``home``.
    """

    home: Path
    roots: tuple[Path, ...]
    denied: tuple[Path, ...] = ()
    models: tuple[AllowedModel, ...] | None = None
    hosts: tuple[str, ...] = ()
    remote_code: bool = False
    free_datasets: bool = False
    may_read_run: Callable[[str], bool] = nothing
    may_read_cache: Callable[[str], bool] = nothing

    def permits(self, path: Path) -> bool:
        """Whether ``path``, with its links followed, may be read; so may a hidden file that is named as a root."""
        real = _real(path)
        if real is None or any(real.is_relative_to(each) for each in self.denied):
            return False
        roots = [root for root in self.roots if real.is_relative_to(root)]
        if real.is_relative_to(self.home):
            inner = [root for root in roots if root != self.home and root.is_relative_to(self.home)]
            return self._grants(real) or _in_plain_sight(real, inner)
        return _in_plain_sight(real, roots)

    def first_outside(self, files: Iterable[Path]) -> Path | None:
        """The first file that may not be read. Links are followed folder by folder: there may be a million files."""
        folders: dict[Path, Path | None] = {}
        for file in files:
            if file.parent not in folders:
                folders[file.parent] = _real(file.parent) if self.permits(file.parent) else None
            real = folders[file.parent]
            plain = real is not None and not file.name.startswith(".") and not file.is_symlink()
            if not (plain and real is not None and real / file.name not in self.denied) and not self.permits(file):
                return file
        return None

    def owned(self, path: Path) -> bool:
        """Whether ``path`` lies in a run folder or cache that may be read."""
        real = _real(path)
        return real is not None and self._grants(real)

    def _grants(self, real: Path) -> bool:
        kind, name = _own_folder(real, self.home)
        return (kind == "runs" and self.may_read_run(name)) or (kind == "caches" and self.may_read_cache(name))

    def allows_model(self, name: str, revision: str | None, root: Path) -> bool:
        """Whether the operator's list has the model: by its id, or by a folder that it lies in."""
        if self.models is None or self.owned(root / name):
            return True
        return any(_is_listed(name, revision, root, entry) for entry in self.models)

    def order(self, config: JobConfig, root: Path) -> dict[str, Any]:
        """As JSON, for the process that runs ``config``: what is granted in ``home`` is settled now."""
        named = [_own_folder(real, self.home) for real in _touched(config, root)]
        named.append(("caches", config.cache.fingerprint or ""))
        return {
            "home": str(self.home),
            "roots": list(map(str, self.roots)),
            "denied": list(map(str, self.denied)),
            "models": None if self.models is None else [[each.name, each.revision] for each in self.models],
            "hosts": list(self.hosts),
            "remote_code": self.remote_code,
            "free_datasets": self.free_datasets,
            "runs": sorted({name for kind, name in named if kind == "runs" and self.may_read_run(name)}),
            "caches": sorted({name for kind, name in named if kind == "caches" and self.may_read_cache(name)}),
        }

    @classmethod
    def from_order(cls, order: dict[str, Any]) -> Confinement:
        """The confinement that ``order`` made JSON of."""
        return cls(
            home=Path(order["home"]),
            roots=tuple(map(Path, order["roots"])),
            denied=tuple(map(Path, order["denied"])),
            models=None if order["models"] is None else tuple(AllowedModel(*each) for each in order["models"]),
            hosts=tuple(order["hosts"]),
            remote_code=order["remote_code"],
            free_datasets=order["free_datasets"],
            may_read_run=frozenset(order["runs"]).__contains__,
            may_read_cache=frozenset(order["caches"]).__contains__,
        )


def require_confined(config: JobConfig, root: Path, order: dict[str, Any] | None) -> None:
    """Raise ``ConfigError`` where the job names what ``order`` does not grant; an order of None grants everything."""
    if order is not None and (problems := confinement_problems(config, root, Confinement.from_order(order))):
        raise ConfigError(problems)


@contextmanager
def confined_datasets(order: dict[str, Any] | None) -> Iterator[None]:
    """Until the end of the block, hold every dataset that this process reads to the files that ``order`` grants."""
    limits = None if order is None else Confinement.from_order(order)
    if limits is None or limits.free_datasets:
        yield
        return
    with datasets_opened_by(partial(open_confined, limits=limits)):
        yield


def confinement_problems(config: JobConfig, root: Path, limits: Confinement) -> list[Problem]:
    """Everything that ``config`` names and may not; relative paths are taken from ``root``."""
    found = [problem for each in named(config) for problem in _refusals(each, root, limits)]
    return [*found, *_sealed(config, limits), *_url(config, limits)]


def read_allow_list(file: Path | None) -> tuple[AllowedModel, ...] | None:
    """The models that a file lists, one hub id or folder a line, @revision after it, # before a comment.

    None where there is no list. Raises ``StorageError`` where there should be one, and it cannot be read.
    """
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"the list of models {file} (KD_MODEL_ALLOW_LIST) cannot be read: {error}."
        raise StorageError(detail, "Give a file with a hub id or folder a line, or unset the variable.") from None
    words = (line.partition("#")[0].strip().partition("@") for line in lines)
    return tuple(AllowedModel(name, revision or None) for name, _, revision in words if name)


# ---------------------------------------------------------------------- what a job names


@dataclass(frozen=True)
class Named:
    """A path in a job, or a hub id: ``pointer`` says where it stands."""

    pointer: str
    name: str
    kind: Literal["model", "text", "dataset", "task"]
    revision: str | None = None
    file: str | None = None


def named(config: JobConfig) -> Iterator[Named]:
    """Every path and hub id in ``config``."""
    yield from _teacher(config)
    yield from _student(config)
    for field, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for number, source in enumerate(sources):
            pointer = f"/data/{field}/{number}"
            if isinstance(source, DatasetSpec):
                yield Named(f"{pointer}/path", source.path, "dataset", source.revision)
            else:
                yield Named(pointer, source, "text")
    for number, task in enumerate(config.evaluation.tasks):
        yield Named(f"/evaluation/tasks/{number}", task, "task")


def _teacher(config: JobConfig) -> Iterator[Named]:
    teacher = config.teacher
    if teacher is not None and teacher.backend == "local":
        yield Named("/teacher/model", teacher.model, "model", teacher.revision, teacher.gguf_file)
    elif teacher is not None and teacher.tokenizer is not None:
        yield Named("/teacher/tokenizer", teacher.tokenizer, "model", teacher.revision)


def _student(config: JobConfig) -> Iterator[Named]:
    student = config.student
    if student is not None and student.model is not None:
        yield Named("/student/model", student.model, "model", student.revision)
    if student is not None and student.init is not None and student.init.tokenizer is not None:
        yield Named("/student/init/tokenizer", student.init.tokenizer, "model")
    space = config.search.space if config.search is not None else {}
    revision = student.revision if student is not None else None
    for field in ("student.model", "student.init.tokenizer"):
        for choice in (space[field].choices or ()) if field in space else ():
            of_model = revision if field == "student.model" else None
            yield Named(f"/search/space/{field}", str(choice), "model", of_model)


def _touched(config: JobConfig, root: Path) -> Iterator[Path]:
    """Where the paths of ``config`` lead, as far as they are no patterns."""
    for each in named(config):
        if (real := _real(root / _prefix(each))) is not None:
            yield real


def _prefix(each: Named) -> str:
    """The part of a path before the first that is a pattern."""
    if each.kind != "text":
        return each.name
    return str(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(each.name).parts)))


# ---------------------------------------------------------------------- what is refused

_OUTSIDE = "Put it below KD_ROOT, or have the operator add its folder to KD_DATA_ROOTS."


def _refusals(each: Named, root: Path, limits: Confinement) -> Iterator[Problem]:
    """What is wrong with one name, the first that is; nothing on the disk is looked at before its place is right."""
    if each.kind == "task" and not _is_file(each):
        return
    if "://" in each.name:
        yield from _at(each.pointer, each.name, limits)
    elif not limits.permits(root / _prefix(each)):
        yield Problem(each.pointer, f"{each.name!r} lies outside the folders that jobs may read.", _OUTSIDE)
    elif (reason := _reason(each, root, limits)) is not None:
        yield Problem(each.pointer, *reason)


def _reason(each: Named, root: Path, limits: Confinement) -> Reason:
    try:
        return _REASONS[each.kind](each, root, limits)
    except (OSError, ValueError) as error:  # ValueError: a byte that no path may have
        return f"{each.name!r} may not be looked at: {error}.", "Check its name, and the mode and owner of its folders."


def _model(each: Named, root: Path, limits: Confinement) -> Reason:
    if not limits.allows_model(each.name, each.revision, root):
        which = f"{each.name!r}" + (f" at revision {each.revision}" if each.revision else "")
        return f"{which} is not on the operator's list of models.", "GET /models tells which are."
    if _leaves(each.revision) or _leaves(each.file):
        return "the revision or file leads out of the model's folder.", "Give a plain name."
    folder = root / each.name
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")] if folder.is_dir() else []
    return _links_out(each.name, files, limits)


def _dataset(each: Named, root: Path, limits: Confinement) -> Reason:
    if each.name in BUILDERS:
        return f"{each.name!r} is a format, and no dataset.", "Name the files themselves, or a dataset's id or folder."
    if _leaves(each.revision):
        return "the revision leads out of the dataset.", "Give a branch, tag or commit."
    folder = (root / each.name).resolve()
    if (linked := _links_out(each.name, folder.rglob("*"), limits)) is not None or limits.free_datasets:
        return linked
    named_outside = folder_reason(folder, limits.permits)
    return named_outside and (f"the dataset {each.name!r} {named_outside[0]}", named_outside[1])


def _text(each: Named, root: Path, limits: Confinement) -> Reason:
    parts = Path(each.name).parts
    if glob.has_magic(each.name) and (".." in parts or parts.count("**") > 1):
        return f"the pattern {each.name!r} has .. or more than one ** in it.", "Give a plainer pattern."
    if (outside := limits.first_outside(find_files(each.name, root))) is not None:
        return f"{each.name!r} takes in {outside.name!r}, which jobs may not read.", _OUTSIDE
    return None


def _task(each: Named, root: Path, limits: Confinement) -> Reason:
    if not limits.remote_code:
        return f"the file {each.name!r} can run code, which the operator does not allow.", "Name a task of lm-eval."
    return _links_out(each.name, (root / each.name).parent.iterdir(), limits)


_REASONS: dict[str, Callable[[Named, Path, Confinement], Reason]] = {
    "model": _model,
    "dataset": _dataset,
    "text": _text,
    "task": _task,
}


def _is_file(each: Named) -> bool:
    """Whether lm-eval takes a task for a file; other names it must know."""
    return each.name.endswith((".yaml", ".yml"))


def _leaves(name: str | None) -> bool:
    return name is not None and (name.startswith(("/", "~")) or ".." in Path(name).parts or "\0" in name)


def _links_out(name: str, files: Iterable[Path], limits: Confinement) -> Reason:
    """Whether one of the files of a folder is a link to what may not be read, or the folder has the service in it."""
    service = {limits.home, *limits.denied}
    for file in files:
        if (file.is_symlink() and not limits.permits(file)) or file in service:
            return f"{name!r} takes in {file.name!r}, which jobs may not read.", _OUTSIDE
    return None


def _sealed(config: JobConfig, limits: Confinement) -> Iterator[Problem]:
    name = config.cache.fingerprint
    if name is not None and not limits.may_read_cache(name):
        yield no_such_cache(name, limits.home)


def no_such_cache(name: str, home: Path) -> Problem:
    """What is said of a cache that is not there, and of one that is another's."""
    return Problem("/cache/fingerprint", f"there is no sealed cache {name!r} below {home}.", "See `kd cache ls`.")


def _real(path: Path) -> Path | None:
    """``path`` without links; None where it cannot be followed: a loop, a name too long, a byte that none may have."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None


def _own_folder(real: Path, home: Path) -> tuple[str, str]:
    """``("runs", id)`` or ``("caches", fingerprint)`` for what lies in such a folder; a pair of empty words else."""
    parts = real.relative_to(home).parts if real.is_relative_to(home) else ()
    return (parts[0], parts[1]) if len(parts) >= 2 else ("", "")


def _in_plain_sight(real: Path, roots: Iterable[Path]) -> bool:
    return any(not any(part.startswith(".") for part in real.relative_to(root).parts) for root in roots)


def _is_listed(name: str, revision: str | None, root: Path, entry: AllowedModel) -> bool:
    if entry.name == name:
        return entry.revision in (None, revision)
    folder, wanted = _real(root / Path(entry.name).expanduser()), _real(root / name)
    return folder is not None and wanted is not None and folder.is_dir() and wanted.is_relative_to(folder)


# ---------------------------------------------------------------------- addresses


def public_address(host: str, allowed: Iterable[str]) -> str:
    """The address of ``host`` to connect to, and to no other: a name that is looked up again may lead elsewhere.

    ``allowed`` holds host names, addresses and networks (``10.0.0.0/8``); ``localhost`` stands for loopback too. The
    host must be among them, and each of its addresses public, or among them itself: never one of a private network,
    of this machine or of a cloud's metadata by accident. Raises ``ConfigError``.
    """
    names = {name.strip().strip("[]").rstrip(".").lower() for name in allowed}
    networks = list(_networks(names))
    plain = host.strip("[]").rstrip(".").lower()
    literal = _literal(plain)
    if plain not in names and not (literal is not None and _within(literal, networks)):
        raise _refuse(
            f"{host} is none of the hosts that the operator allows.",
            "The operator names them: KD_REMOTE_HOSTS, or KD_WEBHOOK_HOSTS for webhooks.",
        )
    addresses = [literal] if literal is not None else _look_up(plain)
    for address in addresses:
        if not _is_public(address) and not _within(address, networks):
            detail = f"{host} has the address {address}, which is not public."
            raise _refuse(detail, "An operator who means it names that very address in that list too.")
    return str(addresses[0])


def _networks(names: set[str]) -> Iterator[Network]:
    for name in (*names, *(_LOOPBACK if "localhost" in names else ())):
        try:
            yield ipaddress.ip_network(name, strict=False)
        except ValueError:  # the name of a host
            continue


def _literal(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _look_up(host: str) -> list[IPAddress]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refuse(f"the host {host} is not found: {error}.", "Check the name, and the server's resolver.") from None
    return [ipaddress.ip_address(address[4][0]) for address in found]


def _within(address: IPAddress, networks: list[Network]) -> bool:
    return any(address in network for network in networks)


def _is_public(address: IPAddress) -> bool:
    """Whether the address is one of the open internet, and no wrapping of one of another kind."""
    if isinstance(address, ipaddress.IPv6Address) and (address.sixtofour or address.teredo or address.is_reserved):
        return False
    return address.is_global and not address.is_multicast and not any(address in each for each in _SPECIAL)


def _url(config: JobConfig, limits: Confinement) -> Iterator[Problem]:
    if config.teacher is not None and config.teacher.url is not None:
        yield from _at("/teacher/url", config.teacher.url, limits)


def _at(pointer: str, url: str, limits: Confinement) -> Iterator[Problem]:
    try:
        public_address(urlsplit(url).hostname or "", limits.hosts)
    except ConfigError as error:
        yield from (Problem(pointer, each.detail, each.remedy) for each in error.problems)
    except ValueError as error:  # no URL at all
        yield Problem(pointer, f"{url!r} is no URL: {error}.", "Give one of the form https://host/path.")


def _refuse(detail: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("", detail, remedy)])
