"""All that the service does with job records."""

from services.store.jobs.caches import CacheLists
from services.store.jobs.changes import JobChanges
from services.store.jobs.counters import Counters
from services.store.jobs.leases import Leases
from services.store.jobs.listing import JobListing
from services.store.jobs.loops import Loops
from services.store.jobs.streams import Streams
from services.store.jobs.teams import Teams


class JobStore(JobChanges, JobListing, Counters, Streams, CacheLists, Leases, Loops, Teams):
    """Jobs in Redis. One call of ``jobs.lua`` makes each change. Methods raise ``RedisError``."""
