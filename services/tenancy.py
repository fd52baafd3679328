"""Whose a job is, and what it may therefore name: the operator's settings and the record, as a ``Confinement``."""

from __future__ import annotations

import re
from pathlib import Path

from kd.config.placement import JOB_ID
from kd.confinement import AllowedModel, Confinement, read_allow_list
from services.jobs import LOCAL, Caller, JobStore
from services.settings import Settings


def confinement_of(settings: Settings, store: JobStore, owner: str) -> Confinement:
    """What a job of ``owner`` may name: of the service's own folder, the runs and caches of the owner's other jobs.

    An admin's key sees every job, but its jobs read no others than it owns: the worker knows owners, and no keys.
    Raises ``StorageError`` where the list of models cannot be read; the predicates raise ``RedisError``.
    """
    caller = LOCAL if owner == LOCAL.name else Caller(owner)
    models = read_allow_list(settings.model_allow_list)
    secret = (settings.api_keys_file, settings.webhook_secret_file, settings.model_allow_list)

    def may_read_run(name: str) -> bool:
        if caller.sees_all:
            return True
        # The name is of a path that a client chose, and job_...:events would be a key of the store's of another kind.
        return re.fullmatch(JOB_ID, name) is not None and store.get(name, caller) is not None

    def may_read_cache(fingerprint: str) -> bool:
        known = store.caches_of(caller)
        return known is None or fingerprint in known

    return Confinement(
        home=settings.home,
        roots=_roots(settings, models or ()),
        denied=tuple(file for file in secret if file is not None),
        models=models,
        hosts=settings.remote_hosts,
        remote_code=settings.trust_remote_code,
        free_datasets=_without_limits(settings),
        may_read_run=may_read_run,
        may_read_cache=may_read_cache,
    )


def _roots(settings: Settings, models: tuple[AllowedModel, ...]) -> tuple[Path, ...]:
    """Where jobs may read."""
    if _without_limits(settings):
        return (Path(settings.root.anchor),)
    return (settings.root, *settings.data_roots, *_folders(models))


def _without_limits(settings: Settings) -> bool:
    """Without keys whoever calls is the user of this host, who may read what the service may."""
    return settings.api_keys_file is None and not settings.data_roots


def _folders(models: tuple[AllowedModel, ...]) -> list[Path]:
    """The folders of the list: what the operator lists may be read wherever it lies."""
    return [path.resolve() for model in models if (path := Path(model.name).expanduser()).is_absolute()]
