"""The OpenAPI document, and the page docs/api.md that is made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import ROOT
from services.api.app import ROUTERS, create_app
from services.settings import Settings


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()


def test_every_answer_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert {"JobConfig", "Job", "JobList", "CacheList", "ProblemDetails"} <= set(schemas)
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in schemas
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["description"]
            assert operation["tags"]
            for status, answer in operation["responses"].items():
                assert answer["description"] not in ("", "Successful Response")
                assert status in ("204", "304") or answer["content"], (
                    operation["operationId"],
                    status,
                )
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), (operation["operationId"], parameter["name"])


def test_every_json_answer_has_a_model(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for answer in operation["responses"].values():
                for media_type, content in answer.get("content", {}).items():
                    # A file that is downloaded has any content.
                    is_file = content["schema"].get("format") == "binary"
                    if media_type.endswith("json") and not is_file:
                        assert "$ref" in content["schema"], (path, media_type)


def test_every_field_says_what_it_means(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert all(field.get("description") for field in schemas["TrainConfig"]["properties"].values())


def test_no_parameter_is_null(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                assert "null" not in json.dumps(parameter["schema"]), (
                    operation["operationId"],
                    parameter["name"],
                )


def test_without_keys_nothing_asks_for_one(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    assert "401" not in json.dumps(document["paths"])


def test_what_is_documented_is_what_there_is(document: dict[str, Any]) -> None:
    routes = [route for router in ROUTERS for route in router.routes]
    there_is = {
        (method, route.path)
        for route in routes
        for method in route.methods
        if route.include_in_schema
    }  # type: ignore[attr-defined]
    documented = {
        (method.upper(), path) for path, found in document["paths"].items() for method in found
    }
    assert {(method, path.replace(":path}", "}")) for method, path in there_is} == documented


def test_the_page_explains_every_status_of_an_error(document: dict[str, Any]) -> None:
    """The routes on the page leave these statuses out."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    explained = page.partition("mean the same for every path:")[2].partition("\n## ")[0]
    operations = [each for path in document["paths"].values() for each in path.values()]
    errors = {status for each in operations for status in each["responses"] if int(status) >= 400}
    assert errors
    assert [status for status in errors if status not in explained] == []


def test_every_link_of_the_page_leads_somewhere() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    headings = {
        line.removeprefix("### ").strip().lower()
        for line in page.splitlines()
        if line.startswith("### ")
    }
    for part in page.split("](#")[1:]:
        assert part.split(")")[0] in headings
    assert (Path(ROOT) / "docs" / "configuration.md").is_file()
