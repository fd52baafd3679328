"""The route of the job files to begin with: those that ``kd init`` fills on a terminal.

GET /templates   all of them, as YAML with comments
"""

from __future__ import annotations

from fastapi import APIRouter

from kd.client.wire.plans import Template, TemplateList
from kd.config.templates.filling import describe_template, draft_template, list_templates
from services.api.guards.json_bodies import StrictRoute
from services.api.routes.access import READ, guard

#: The name of a job that is not named yet.
JOB_NAME = "job"

router = APIRouter(tags=["jobs"], route_class=StrictRoute)


@router.get("/templates", **guard(READ))
def list_job_templates() -> TemplateList:
    """List job files to begin with; teacher, student and text are for the user to fill in."""
    texts = {name: draft_template(name, JOB_NAME, {}) for name in list_templates()}
    found = [Template(name=name, title=describe_template(name), text=texts[name]) for name in texts]
    return TemplateList(data=found)
