"""What was kept of teachers.

GET    /caches                        newest first
GET    /caches/{fingerprint}          one of them, and how close it is to its teacher
DELETE /caches/{fingerprint}          remove it; 409 while a job makes or reads it
POST   /caches/{fingerprint}/verify   read every byte of it, as a job

A cache is one folder for all who made or read it: who deletes one that others have too only loses sight of it.
An admin, who sees those of all, removes it for all.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi import Path as InPath

from cache.errors import CacheError
from kd.config.job import JobConfig
from kd.jobfile import parse_config
from services.api.access import READ, WRITE
from services.api.jobs import TAKEN, IdempotencyKey, TheDesk, taken
from services.api.problems import Answers, ApiProblem, responses
from services.api.service import TheCaller, TheService
from services.schemas import CacheDetail, CacheEntry, CacheList, Fidelity, Job

FINGERPRINT = re.compile(r"[0-9a-f]{32}")

router = APIRouter(tags=["caches"])

GONE: Answers = {204: {"description": "It is gone, or out of the caller's sight."}}


def known_cache(
    fingerprint: Annotated[str, InPath(description="32 hexadecimal digits.")], service: TheService, caller: TheCaller
) -> Path:
    """The folder of the cache that the path names, or 404: also for one of another key's jobs alone."""
    folder, own = service.settings.caches / fingerprint, service.store.caches_of(caller)
    seen = own is None or fingerprint in own
    if not FINGERPRINT.fullmatch(fingerprint) or not seen or not folder.is_dir():
        raise _no_cache(fingerprint)
    return folder


def _no_cache(fingerprint: str) -> ApiProblem:
    return ApiProblem(404, f"There is no cache {fingerprint}.", "GET /caches lists the caches there are.")


KnownCache = Annotated[Path, Depends(known_cache)]


@router.get("/caches", dependencies=READ, responses=responses(503))
def list_caches(service: TheService, caller: TheCaller) -> CacheList:
    """What was kept of teachers, newest first."""
    from cache.store import list_caches as caches_in

    own = service.store.caches_of(caller)
    found = [summary for summary in caches_in(service.settings.caches) if own is None or summary.fingerprint in own]
    return CacheList(data=[CacheEntry(**summary.to_json()) for summary in found])


@router.get("/caches/{fingerprint}", dependencies=READ, responses=responses(404, 422, 503))
def get_cache(folder: KnownCache) -> CacheDetail:
    """What one cache holds and was made from, and how close it is to its teacher."""
    from cache.store import read_manifest, summarise

    summary = summarise(folder)
    if not summary.complete:
        return CacheDetail(**summary.to_json())
    manifest = read_manifest(folder)
    rows = [Fidelity(**asdict(row)) for row in manifest.fidelity]
    return CacheDetail(**summary.to_json(), identity=manifest.identity.to_json(), fidelity=rows)


@router.delete(
    "/caches/{fingerprint}",
    status_code=204,
    dependencies=WRITE,
    responses=GONE | responses(404, 409, 422, 429, 503),
)
def delete_cache(folder: KnownCache, service: TheService, caller: TheCaller) -> Response:
    """Remove a cache that no open job makes or reads."""
    users = service.store.cache_users(folder.name)
    if seen := [job_id for job_id in users if service.store.get(job_id, caller) is not None]:
        detail = f"The cache {folder.name} is used by {', '.join(seen[:5])}, which has not ended."
        raise ApiProblem(409, detail, "Wait for it, or cancel it.", "in-use")
    if caller.sees_all:  # and removes it for all: nobody loses sight of one that turns out to be in use
        _remove(folder)
        service.store.forget_cache(caller, folder.name)
    elif not service.store.forget_cache(caller, folder.name) and not users:
        _remove(folder)
    return Response(status_code=204)


def _remove(folder: Path) -> None:
    from cache.operations import remove_cache

    try:
        remove_cache(folder)
    except FileNotFoundError:
        raise _no_cache(folder.name) from None
    except CacheError as error:
        raise ApiProblem(409, f"The cache {folder.name} is being captured.", error.remedy, "in-use") from None


@router.post(
    "/caches/{fingerprint}/verify",
    status_code=202,
    response_model=Job,
    dependencies=WRITE,
    responses=TAKEN | responses(404, 409, 422, 429, 503, 507),
)
def verify_cache(folder: KnownCache, response: Response, desk: TheDesk, idempotency_key: IdempotencyKey = None) -> Job:
    """Read every byte of a cache and compare it with what was sealed: a job, which fails where something differs."""
    if not (folder / "manifest.json").is_file():
        raise ApiProblem(409, f"The cache {folder.name} is not sealed yet.", "Wait for its capture.", "not-sealed")
    return taken(desk, _verification(folder.name), idempotency_key, response)


def _verification(fingerprint: str) -> JobConfig:
    return parse_config({"kind": "verify", "name": f"verify-{fingerprint[:12]}", "cache": {"fingerprint": fingerprint}})
