"""Routes of the teacher caches.

GET    /caches                          list them, newest first
GET    /caches/{fingerprint}            show one, and how close it is to its teacher
DELETE /caches/{fingerprint}            remove one; 409 while a job writes or reads it
POST   /caches/{fingerprint}/verify     create a job that reads every byte of one
POST   /caches/{fingerprint}/fidelity   create a job that compares one with its teacher

A cache is one folder, which several callers may share. A caller who deletes a shared cache no
longer sees it, but the folder stays for the others. An admin, who sees all caches, removes it for
all.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi import Path as InPath

from cache.errors import CacheError
from cache.remote.bucket import is_stored
from cache.shards.names import FINGERPRINT
from kd.client.wire.caches import CacheDetail, CacheEntry, CacheList, Fidelity, OverruledVerdict
from kd.client.wire.jobs import Job
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.python.runs import find_makers
from services.api.answers.problems import Answers, ApiProblem
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ, WRITE, guard
from services.api.routes.jobs import IdempotencyKey, TheAdmission, accept_job, guard_change
from services.api.service import Service, TheCaller, TheService
from services.store.callers import Caller

router = APIRouter(tags=["caches"], route_class=StrictRoute)

DELETE_RESPONSES: Answers = {
    204: {"description": "The cache is removed, or no longer visible to the caller."}
}


def find_known_cache(
    fingerprint: Annotated[str, InPath(description="32 hexadecimal digits.")],
    service: TheService,
    caller: TheCaller,
) -> Path:
    """Return the folder of the cache that the path names.

    Raises 404 if there is no such cache, or if only jobs of other keys use it.
    """
    folder = service.settings.caches / fingerprint
    own = service.store.find_caches(caller)  # None: the caller sees all caches
    visible = own is None or fingerprint in own
    if not FINGERPRINT.fullmatch(fingerprint) or not visible or not is_stored(folder):
        raise _make_no_cache_problem(fingerprint)
    return folder


def _make_no_cache_problem(fingerprint: str) -> ApiProblem:
    return ApiProblem(404, f"There is no cache {fingerprint}.", "GET /caches lists the caches.")


KnownCache = Annotated[Path, Depends(find_known_cache)]


@router.get("/caches", **guard(READ))
def list_caches(service: TheService, caller: TheCaller) -> CacheList:
    """List the caches, newest first."""
    from cache.checking.listing import list_caches as find_caches

    own = service.store.find_caches(caller)
    makers = _find_makers(service, caller)
    found = [
        CacheEntry(**asdict(each), **makers.get(each.fingerprint, {}))
        for each in find_caches(service.settings.caches)
        if own is None or each.fingerprint in own
    ]
    return CacheList(data=found)


@router.get("/caches/{fingerprint}", **guard(READ, 404, 422))
def get_cache(folder: KnownCache, service: TheService, caller: TheCaller) -> CacheDetail:
    """Show what one cache holds, what it was made from, and how close it is to its teacher."""
    from cache.checking.listing import summarise_cache
    from cache.store import read_manifest

    summary = summarise_cache(folder)
    facts = {**asdict(summary), **_find_makers(service, caller).get(folder.name, {})}
    if summary.complete:
        manifest = read_manifest(folder)
        facts["identity"] = manifest.identity.to_json()
        facts["fidelity"] = [Fidelity(**asdict(row)) for row in manifest.fidelity]
        if manifest.overruled:
            facts["overruled"] = OverruledVerdict(**manifest.overruled.to_json())
    return CacheDetail(**facts)


def _find_makers(service: Service, caller: Caller) -> dict[str, dict[str, str]]:
    """The text and the job of each cache, as far as the caller may see the job."""
    return find_makers(service.settings.runs, service.store.find_jobs(caller))


@router.delete(
    "/caches/{fingerprint}",
    status_code=204,
    **guard(WRITE, 404, 409, 422, 429, answers=DELETE_RESPONSES),
)
def delete_cache(folder: KnownCache, service: TheService, caller: TheCaller) -> Response:
    """Remove a cache that no unfinished job writes or reads."""
    users = service.store.find_cache_users(folder.name)
    visible = [job_id for job_id in users if service.store.get(job_id, caller) is not None]
    if visible:
        detail = f"The cache {folder.name} is used by unfinished jobs: {', '.join(visible[:5])}."
        raise ApiProblem(409, detail, "Wait for them, or cancel them.", "in-use")
    if caller.sees_all:
        # The folder goes first: if its removal is refused, every caller still sees the cache.
        _remove(folder, service)
        service.store.forget_cache(caller, folder.name)
    elif not service.store.forget_cache(caller, folder.name) and not users:
        _remove(folder, service)
    service.audit.record(caller, "cache.delete", folder.name)
    return Response(status_code=204)


def _remove(folder: Path, service: Service) -> None:
    from cache.operations import remove_cache

    def require_unused() -> None:
        if service.store.find_cache_users(folder.name):  # created since the request was checked
            detail = f"A job that has not ended uses the cache {folder.name}."
            raise ApiProblem(409, detail, "Wait for its end, or cancel it.", "in-use")

    try:
        remove_cache(folder, require_unused)
    except FileNotFoundError:
        raise _make_no_cache_problem(folder.name) from None
    except CacheError as error:
        detail = f"The cache {folder.name} is being captured or read."
        raise ApiProblem(409, detail, error.remedy, "in-use") from None


_CHECK = guard_change(404, 409, 422, 429, 507)


@router.post("/caches/{fingerprint}/verify", **_CHECK)
def verify_cache(
    folder: KnownCache,
    response: Response,
    admission: TheAdmission,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Create a job that compares a cache with its digests, and fails if a byte differs."""
    _require_sealed(folder)
    return accept_job(admission, _make_check("verify", folder), idempotency_key, response)


@router.post("/caches/{fingerprint}/fidelity", **_CHECK)
def measure_fidelity(
    folder: KnownCache,
    service: TheService,
    response: Response,
    admission: TheAdmission,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Create a job that compares some records with the teacher, and fails if they differ.

    The teacher is the one that the cache names. The cache keeps what is measured.
    """
    _require_sealed(folder)
    found = service.reading.read("teacher", folder)
    named = PurePosixPath(found["name"])
    teacher = {"model": found["name"], "revision": found["revision"] or None}
    if named.suffix == ".gguf":
        teacher |= {"model": str(named.parent), "gguf_file": named.name}
    if found["spread"]:
        teacher["parallel"] = "device_map"
    job = _make_check("fidelity", folder, teacher=teacher)
    return accept_job(admission, job, idempotency_key, response)


def _require_sealed(folder: Path) -> None:
    if not (folder / "manifest.json").is_file():
        detail = f"The cache {folder.name} is not sealed yet."
        raise ApiProblem(409, detail, "Wait for its capture.", "not-sealed")


def _make_check(kind: str, folder: Path, **sections: Any) -> JobConfig:
    name = f"{kind}-{folder.name[:12]}"
    data = {"kind": kind, "name": name, "cache": {"fingerprint": folder.name}}
    return parse_config(data | sections)
