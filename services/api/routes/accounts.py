"""Routes of what teams use, and of what callers did.

GET /quota   what the caller's team uses, and its quotas; for an admin of all teams
GET /audit   the audit log, newest first, by cursor; for admins
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from kd.client.wire.accounts import AuditEntry, AuditList, TeamList
from services.api.answers.accounts import describe_account
from services.api.answers.cursors import decode_cursor, encode_cursor
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import ADMIN, READ, guard
from services.api.routes.jobs import Moment
from services.api.service import TheCaller, TheService
from services.store.audit import AuditQuery

router = APIRouter(tags=["service"], route_class=StrictRoute)


@router.get("/quota", **guard(READ))
def list_quotas(service: TheService, caller: TheCaller) -> TeamList:
    """Show what the caller's team uses, and its quotas; an admin sees all teams, its own first."""
    accounts = service.store.read_accounts(caller.team)
    if caller.sees_all:
        others = service.store.read_accounts()
        accounts += [account for account in others if account.team != caller.team]
    return TeamList(data=[describe_account(account) for account in accounts])


@router.get("/audit", **guard(ADMIN, 422))
def list_audit(
    service: TheService,
    actor: Annotated[
        str | None, Query(max_length=200, description="Only what this key's owner did.")
    ] = None,
    action: Annotated[
        str | None,
        Query(
            max_length=64,
            description="Only this action, such as job.cancel; job means all actions on jobs.",
        ),
    ] = None,
    target: Annotated[
        str | None, Query(max_length=200, description="Only what was done to this job or cache.")
    ] = None,
    after: Annotated[
        Moment | None, Query(description="Only what was done after this time.")
    ] = None,
    before: Annotated[
        Moment | None, Query(description="Only what was done before this time.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="The most entries of one page.")] = 100,
    cursor: Annotated[str | None, Query(description="The next_cursor of the page before.")] = None,
) -> AuditList:
    """Show who did what, newest first.

    A page may be short or even empty although more follow: read on until next_cursor is null.
    """
    query = AuditQuery(actor, action, target, after, before)
    page = service.audit.log.read_page(query, limit, decode_cursor(cursor))
    following = encode_cursor(page.next_cursor)
    entries = [AuditEntry.model_validate(entry) for entry in page.entries]
    return AuditList(data=entries, has_more=following is not None, next_cursor=following)
