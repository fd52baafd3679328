"""The schema of a job in the OpenAPI document, from which the dashboard's form is made."""

from __future__ import annotations

from kd.config.job import JobConfig
from services.api.app import create_app
from services.settings import Settings


def test_the_schema_tells_sections_that_are_always_there_from_optional_ones() -> None:
    document = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()
    body = document["paths"]["/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/JobConfig"}
    fields = document["components"]["schemas"]["JobConfig"]["properties"]
    made = {name for name, field in JobConfig.model_fields.items() if field.default_factory}
    assert {name for name, field in fields.items() if field.get("default") == {}} == made
    assert {"data", "loss", "labels"} <= made
    assert not {"teacher", "student", "search"} & made
