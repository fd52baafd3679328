"""Records for runs whose record was lost, for instance with the data of Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from services.store.jobs.records import build_fields
from services.store.jobs.script import ScriptedStore, flatten_fields
from services.store.run_folder import FoundRun


class Adoption(ScriptedStore):
    """Finds runs that no record names, and restores their records."""

    def list_unknown(self, job_ids: Sequence[str]) -> list[str]:
        """The ids among ``job_ids`` that have no record."""
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.exists(f"kd:job:{job_id}")
        known = pipeline.execute() if job_ids else []
        return [job_id for job_id, exists in zip(job_ids, known, strict=True) if not exists]

    def adopt(self, run: FoundRun, owner: str) -> bool:
        """Write the record of a run; return whether there was none.

        Its times are those of the adoption. It depends on no job and has no webhook: both concern
        a time that has passed.
        """
        config = run.config.model_copy(update={"depends_on": (), "webhook": None})
        fields = build_fields(config, self._max_attempts) | {"stage": run.stage}
        if run.fingerprint is not None:
            fields["cache.fingerprint"] = json.dumps(run.fingerprint)
        for name, path in run.artifacts.items():
            fields[f"artifacts.{name}"] = json.dumps(str(path))
        status = "succeeded" if run.error is None else "failed"
        head = (run.id, owner, status, json.dumps(run.error))
        return cast(str, self._transition("adopt", *head, *flatten_fields(fields))) == "adopted"
