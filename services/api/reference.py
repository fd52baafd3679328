"""Render the page ``docs/api.md`` from the API's OpenAPI document.

``make docs`` writes the file, and a test compares the file with what this module renders. Needs no
Redis.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.api.app import create_app
from services.settings import Settings

INTRODUCTION = """\
# HTTP API

<!-- Written by `make docs` from services/api: edit the descriptions there. -->

Every path exists twice, at `/` and at `/v1`. `GET /openapi.json` describes the same API for
programs. Bodies are JSON; the body of a job is described in [configuration.md](configuration.md).

- **Keys.** If the operator has set `KD_API_KEYS_FILE`, every request except the health checks must
  send `Authorization: Bearer kd_...`. A key sees the jobs and caches of its own name; the others
  are 404. Scope `read` may read, `write` may also create and change, and `admin` also sees the jobs
  and caches of all names, the quotas of all teams and the audit log. A key that has expired is 401
  with the type `key-expired`; in the last 14 days before that, every answer has the header
  `Potstill-Key-Expires`.
- **Errors** are problem documents (RFC 9457, `application/problem+json`): `type`, `title`,
  `status`, `detail`, `remedy`, `instance`, `request_id`, and `errors` with a JSON pointer for each
  wrong field. Any path may also answer 400 for an unknown `Host` or for `If-Match`, which no path
  compares, 401 without a valid key, 403 if the key lacks the scope or a foreign page asks, 429 with
  `Retry-After` above the caller's rate or a quota (`quota-exceeded`, where `quota` says which, how
  much is used and what frees it up), and 503 with `Retry-After` while the job store is away.
  `POST /jobs/validate` and a dry run also answer 503 (`check-limit`) if the check takes more time
  or memory than the operator allows.
- **Files to train on** are sent as they are, not as JSON: [how-to/files.md](how-to/files.md).
- **Headers.** `Idempotency-Key` makes a POST safe to send again for a day. `X-Request-ID` is kept
  or made; it is in the answer, in the log and in the job. `RateLimit` and `RateLimit-Policy` show
  how many requests are left.
- **Numbers** are finite or null.
"""

#: The schema of a job's body. docs/configuration.md describes it and all that it holds.
_JOB_SCHEMA = "JobConfig"
#: Statuses that any path may answer with; the introduction describes them once.
_COMMON_STATUSES = ("400", "401", "403", "429", "503")
Schema = dict[str, Any]


def render_api_page() -> str:
    """Render the whole page, as Markdown."""
    # With a key file, so that the page describes keys. Neither the file nor Redis is opened.
    document = create_app(
        Settings(redis_url="redis://127.0.0.1:1/0", api_keys_file=Path("keys"))
    ).openapi()
    schemas: Schema = document["components"]["schemas"]
    sections = [INTRODUCTION]
    tag = None
    for path, method, operation in _list_operations(document):
        if operation["tags"][0] != tag:
            tag = operation["tags"][0]
            sections.append(f"## {tag.capitalize()}\n")
        sections.append(_render_operation(path, method, operation))
    sections.append("## Bodies and answers\n")
    sections += [_render_model(name, schemas[name]) for name in _list_models(document, schemas)]
    return "\n".join(sections)


def _list_operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method.upper(), operation


def _render_operation(path: str, method: str, operation: Schema) -> str:
    lines = [f"### `{method} {path}`\n", f"{operation['description']}\n"]
    if parameters := operation.get("parameters"):
        lines += [
            "| parameter | in | value | meaning |\n|---|---|---|---|",
            *map(_render_parameter, parameters),
            "",
        ]
    if body := operation.get("requestBody"):
        lines.append(f"Body: {_describe_value(_find_schema(body))}.\n")
    lines += ["| status | answer |\n|---|---|", *_render_statuses(operation), ""]
    return "\n".join(lines)


def _render_parameter(parameter: Schema) -> str:
    meaning = parameter.get("description", "") or parameter["schema"].get("description", "")
    value = _describe_value(parameter["schema"])
    default = parameter["schema"].get("default")
    remark = "" if default in (None, False) else f" Default {default}."
    meaning = _escape_cell(meaning) + remark
    return f"| `{parameter['name']}` | {parameter['in']} | {value} | {meaning} |"


def _render_statuses(operation: Schema) -> Iterator[str]:
    for status, answer in operation["responses"].items():
        if status not in _COMMON_STATUSES:
            shown = (
                _describe_value(_find_schema(answer))
                if "content" in answer and int(status) < 300
                else ""
            )
            headers = ", ".join(f"`{name}`" for name in answer.get("headers", ()))
            parts = [
                _escape_cell(answer["description"]).rstrip("."),
                shown,
                f"with {headers}" if headers else "",
            ]
            yield f"| {status} | {'; '.join(filter(None, parts))} |"


def _find_schema(described: Schema) -> Schema:
    """Return the schema of the first media type; a type other than JSON is its own schema."""
    media_type, content = next(iter(described["content"].items()))
    return content.get("schema", {}) if media_type.endswith("json") else {"title": media_type}


def _list_models(document: Schema, schemas: Schema) -> list[str]:
    """List the models that bodies and answers hold, each before the models inside it."""
    found: list[str] = []
    for _, _, operation in _list_operations(document):
        for answer in (operation.get("requestBody", {}), *operation["responses"].values()):
            _collect(answer.get("content", {}), schemas, found)
    return found


def _collect(node: Any, schemas: Schema, found: list[str]) -> None:
    if isinstance(node, list):
        for item in node:
            _collect(item, schemas, found)
    elif isinstance(node, dict):
        name = node["$ref"].rpartition("/")[2] if "$ref" in node else _JOB_SCHEMA
        if name != _JOB_SCHEMA and name not in found:
            found.append(name)
            _collect(schemas[name], schemas, found)
        for item in node.values():
            _collect(item, schemas, found)


def _render_model(name: str, schema: Schema) -> str:
    lines = [
        f"### {name}\n",
        f"{schema['description']}\n",
        "| field | value | meaning |\n|---|---|---|",
    ]
    for field, options in schema["properties"].items():
        meaning = _escape_cell(options.get("description", ""))
        lines.append(f"| `{field}` | {_describe_value(options)} | {meaning} |")
    return "\n".join([*lines, ""])


_WORDS = {
    "boolean": "true or false",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "null": "null",
}


def _describe_value(schema: Schema) -> str:
    """Describe in words the values that ``schema`` allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "[a job](configuration.md)" if name == _JOB_SCHEMA else f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_describe_value, options)))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_describe_value(schema['items'])}"
    if kind == "object":
        return "object"
    if schema.get("format") == "date-time":
        return "time"
    return _WORDS.get(str(kind), "") + _describe_bounds(schema) or _escape_cell(
        schema.get("title", "anything")
    )


def _describe_bounds(schema: Schema) -> str:
    low = schema.get("minimum")
    high = schema.get("maximum")
    return f" from {low} to {high}" if low is not None and high is not None else ""


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render_api_page())
