"""Celery as a channel of hints: a message says "job X has a stage to run".

A hint may be lost or come twice: the record in Redis (``jobs.lua``) decides, and the reconciler
sends lost hints again. A hint is acknowledged before its job runs, because Redis would hand out an
unacknowledged one again after an hour. Nothing waits for a result, because a result backend can
leave a worker alive that receives nothing any more.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery
from kombu.connection import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from services.store.connection import make_broker

TASK_NAME = "kd.run_stage"
#: Prefix of Celery's keys. ``jobs.lua`` contains it too.
QUEUE_PREFIX = "kd:celery:"

CONFIGURATION = {
    "task_serializer": "json",
    "accept_content": ["json"],
    "result_backend": None,
    "task_ignore_result": True,
    "task_store_errors_even_if_ignored": False,
    "task_acks_late": False,
    "task_reject_on_worker_lost": False,
    "task_publish_retry": False,
    "task_send_sent_event": False,
    "worker_pool": "threads",
    "worker_concurrency": 1,
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    "worker_enable_remote_control": False,
    "worker_send_task_events": False,
    "worker_hijack_root_logger": False,
    "worker_soft_shutdown_timeout": 0,
    # True, the coming default, kills a running job and drops its message when Redis restarts.
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
}

log = logging.getLogger("potstill.queue")


class PromptConnection(Connection):
    """Tries again every two seconds; the library's own waits grow to half a minute in an outage."""

    def _ensure_connection(self, *arguments: Any, **options: Any) -> Any:
        prompt = {"interval_step": 0, "interval_max": 2} | options
        return super()._ensure_connection(*arguments, **prompt)  # type: ignore[no-untyped-call]


def make_celery_app(redis_url: str, socket_timeout: float = 10.0) -> Celery:
    """Make the Celery application of an API or a worker. ``socket_timeout`` is in seconds."""
    broker = make_broker(redis_url, socket_timeout)
    app = Celery("potstill", broker=broker.url, set_as_current=False)
    app.conf.update(CONFIGURATION)
    app.conf.broker_use_ssl = broker.use_ssl
    app.amqp.Connection = PromptConnection
    app.conf.broker_transport_options = {
        "ack_emulation": False,
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": min(5.0, socket_timeout),
        "socket_keepalive": True,
        "health_check_interval": 10,
        "visibility_timeout": 30 * 86400,
        "global_keyprefix": QUEUE_PREFIX,
        **broker.transport_options,
    }
    return app


def publish_hint(app: Celery, job_id: str, stage: str) -> bool:
    """Tell a worker of ``stage`` that the job waits.

    Returns False if that failed. The reconciler will send the hint then.
    """
    try:
        app.send_task(TASK_NAME, args=[job_id, stage], queue=stage)
    except (OperationalError, RedisError, OSError) as error:
        log.warning("no hint sent for %s (%s): the reconciler will send it", job_id, error)
        return False
    return True
