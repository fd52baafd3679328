"""The page ``docs/api.md``, from the OpenAPI document of the API.

``make docs`` writes the file; a test compares it with what this module renders. Asks no Redis.
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

Every path is there twice, at `/` and at `/v1`; `GET /openapi.json` describes the same for programs. Bodies are JSON;
that of a job is told in [configuration.md](configuration.md).

- **Keys.** Where the operator has set `KD_API_KEYS_FILE`, every request but those for health shows
  `Authorization: Bearer kd_...`. A key sees the jobs and caches of its own name; those of others are 404 to it.
  Scope `read` looks, `write` also posts and changes, `admin` also sees everybody's.
- **Errors** are problem documents (RFC 9457, `application/problem+json`): `type`, `title`, `status`, `detail`,
  `remedy`, `instance`, `request_id`, and `errors` with a JSON pointer for each wrong field. Any path may also answer
  400 for an unknown `Host`, 401 without a key that holds, 403 for want of scope or from a foreign page, 429 with
  `Retry-After` beyond the caller's rate, and 503 with `Retry-After` while the job store is away.
- **Headers.** `Idempotency-Key` makes a POST safe to send again for a day. `X-Request-ID` is taken over or made,
  answered, and found again in log and job. `RateLimit` and `RateLimit-Policy` tell what is left.
- **Numbers** are finite or null.
"""

_ELSEWHERE = "JobConfig"  #: with all below it, in docs/configuration.md
_SHOWN_ANYWHERE = ("400", "401", "403", "429", "503")
Schema = dict[str, Any]


def render() -> str:
    """The whole page, as markdown."""
    document = create_app(Settings(redis_url="redis://127.0.0.1:1/0", api_keys_file=Path("keys"))).openapi()
    schemas: Schema = document["components"]["schemas"]
    sections = [INTRODUCTION]
    tag = None
    for path, method, operation in _operations(document):
        if operation["tags"][0] != tag:
            tag = operation["tags"][0]
            sections.append(f"## {tag.capitalize()}\n")
        sections.append(_operation(path, method, operation))
    sections.append("## Answers\n")
    sections += [_answer(name, schemas[name]) for name in _named(document, schemas)]
    return "\n".join(sections)


def _operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method.upper(), operation


def _operation(path: str, method: str, operation: Schema) -> str:
    lines = [f"### `{method} {path}`\n", f"{operation['description']}\n"]
    if parameters := operation.get("parameters"):
        lines += ["| parameter | in | value | meaning |\n|---|---|---|---|", *map(_parameter, parameters), ""]
    if body := operation.get("requestBody"):
        lines.append(f"Body: {_value(_content(body))}.\n")
    lines += ["| status | answer |\n|---|---|", *_statuses(operation), ""]
    return "\n".join(lines)


def _parameter(parameter: Schema) -> str:
    meaning = parameter.get("description", "") or parameter["schema"].get("description", "")
    default = parameter["schema"].get("default")
    told = "" if default in (None, False) else f" Default {default}."
    return f"| `{parameter['name']}` | {parameter['in']} | {_value(parameter['schema'])} | {_cell(meaning)}{told} |"


def _statuses(operation: Schema) -> Iterator[str]:
    for status, answer in operation["responses"].items():
        if status not in _SHOWN_ANYWHERE:
            shown = _value(_content(answer)) if "content" in answer and int(status) < 300 else ""
            headers = ", ".join(f"`{name}`" for name in answer.get("headers", ()))
            told = [_cell(answer["description"]).rstrip("."), shown, f"with {headers}" if headers else ""]
            yield f"| {status} | {'; '.join(filter(None, told))} |"


def _content(described: Schema) -> Schema:
    """The schema of the first media type; of one that is no JSON, the type itself."""
    media_type, content = next(iter(described["content"].items()))
    return content.get("schema", {}) if media_type.endswith("json") else {"title": media_type}


def _named(document: Schema, schemas: Schema) -> list[str]:
    """The models that answers hold, each before what is inside of it."""
    found: list[str] = []
    for _, _, operation in _operations(document):
        for answer in operation["responses"].values():
            _collect(answer.get("content", {}), schemas, found)
    return found


def _collect(node: Any, schemas: Schema, found: list[str]) -> None:
    if isinstance(node, list):
        for item in node:
            _collect(item, schemas, found)
    elif isinstance(node, dict):
        name = node["$ref"].rpartition("/")[2] if "$ref" in node else _ELSEWHERE
        if name != _ELSEWHERE and name not in found:
            found.append(name)
            _collect(schemas[name], schemas, found)
        for item in node.values():
            _collect(item, schemas, found)


def _answer(name: str, schema: Schema) -> str:
    lines = [f"### {name}\n", f"{schema['description']}\n", "| field | value | meaning |\n|---|---|---|"]
    for field, options in schema["properties"].items():
        lines.append(f"| `{field}` | {_value(options)} | {_cell(options.get('description', ''))} |")
    return "\n".join([*lines, ""])


_WORDS = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text", "null": "null"}


def _value(schema: Schema) -> str:
    """What a value may be, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "[a job](configuration.md)" if name == _ELSEWHERE else f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_value, options)))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_value(schema['items'])}"
    if kind == "object":
        return "object"
    if schema.get("format") == "date-time":
        return "time"
    return _WORDS.get(str(kind), "") + _bounds(schema) or _cell(schema.get("title", "anything"))


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    return f" from {low} to {high}" if low is not None and high is not None else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render())
