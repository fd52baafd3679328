"""The files, models and hosts that a job may name, which its owner and the settings decide."""

from __future__ import annotations

import re
from pathlib import Path

from kd.config.placement import JOB_ID_PATTERN
from kd.preflight.limits import Confinement, read_allow_list
from services.settings import Settings
from services.store.callers import LOCAL_CALLER, Caller
from services.store.jobs.store import JobStore


def build_confinement(
    settings: Settings, store: JobStore, owner: str, team: str | None = None
) -> Confinement:
    """Build the limits of a job of ``owner``, which may read the runs and caches of that owner.

    It may also read the uploaded files of its ``team``; None = the team of the owner's own name.

    An admin's key sees every job, but its jobs read only what it owns: the worker knows the owner
    and no key. Raises ``StorageError`` if the list of models cannot be read. The predicates raise
    ``RedisError``.
    """
    caller = LOCAL_CALLER if owner == LOCAL_CALLER.name else Caller(owner)
    models = read_allow_list(settings.model_allow_list)
    secret = (settings.api_keys_file, settings.webhook_secret_file, settings.model_allow_list)

    unlimited = settings.api_keys_file is None and not settings.data_roots
    if unlimited:  # without keys, the caller is a user of this host
        # The root itself too: it may lie in a hidden folder, as a wheel in .venv does.
        roots = [Path(settings.root.anchor), settings.root]
    else:
        # The folders in the list of models may lie anywhere: the operator listed them.
        named = (Path(model.name).expanduser() for model in models or ())
        folders = (path.resolve() for path in named if path.is_absolute())
        roots = [settings.root, *settings.data_roots, *folders]

    def may_read_run(name: str) -> bool:
        if caller.sees_all:
            return True
        # A client chose the name. Something like job_...:events would be another kind of key.
        return (
            re.fullmatch(JOB_ID_PATTERN, name) is not None and store.get(name, caller) is not None
        )

    def may_read_cache(fingerprint: str) -> bool:
        known = store.find_caches(caller)
        return known is None or fingerprint in known

    return Confinement(
        home=settings.home,
        roots=(*roots, settings.files / (team or owner)),
        denied=tuple(file for file in secret if file is not None),
        models=models,
        hosts=settings.remote_hosts,
        remote_code=settings.trust_remote_code,
        free_datasets=unlimited,
        may_read_run=may_read_run,
        may_read_cache=may_read_cache,
        store=settings.store,
        stores=settings.data_stores,
    )
