"""All that the service does with job records."""

from __future__ import annotations

from services.store.jobs.actions import JobActions
from services.store.jobs.caches import CacheLists
from services.store.jobs.counters import Counters
from services.store.jobs.creation import Adoption, JobCreation
from services.store.jobs.deliveries import Deliveries
from services.store.jobs.leases import Leases
from services.store.jobs.listing import JobListing
from services.store.jobs.reconciling import Reconciling
from services.store.jobs.streams import Streams
from services.store.jobs.teams import Teams
from services.store.jobs.trials import Trials


class JobStore(
    JobCreation,
    JobActions,
    JobListing,
    Counters,
    Streams,
    CacheLists,
    Leases,
    Trials,
    Reconciling,
    Deliveries,
    Adoption,
    Teams,
):
    """Jobs in Redis. One call of ``jobs.lua`` makes each change. Methods raise ``RedisError``."""
