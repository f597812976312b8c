"""JSON schemas of all reports, made from the tables of reports.md: ``python docs/make_schemas.py``.

The tables are held against real reports by the tests, and so are the schemas.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["schemas"]

DOCS = Path(__file__).parent

# Objects that another table describes too.
_SAME = {
    "inspect.outputs": "inspect.inputs",
    "verify.token_differences.rewritten": "verify.token_differences.reference",
    "bench.rows.b": "bench.rows.a",
    "bench.creation.a": "bench.rows.a.latency",
    "bench.creation.b": "bench.rows.a.latency",
}
# Documents that are a list of what their table describes.
_LISTED = {"passes"}
_SIMPLE = {"string", "integer", "number", "boolean"}
_PLURALS = {"strings": "string", "integers": "integer", "numbers": "number"}

Tables = dict[str, dict[str, str]]


def schemas(text: str) -> dict[str, dict[str, Any]]:
    """One schema for each document of the page ``text``, by its name."""
    tables = _tables(text)
    found = {}
    for name in tables:
        if "." not in name:
            about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
            schema = _object(name, tables)
            found[name] = about | ({"type": "array", "items": schema} if name in _LISTED else schema)
    return found


def _tables(text: str) -> Tables:
    tables: Tables = {}
    for path, section in re.findall(r"<!-- (?:\w+ )?fields: (\S+) -->\n(.*?)(?=\n#|\n<!--|\Z)", text, flags=re.S):
        tables[path] = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, flags=re.M))
    return tables


def _object(path: str, tables: Tables) -> dict[str, Any]:
    fields = tables.get(_SAME.get(path, path))
    if fields is None:
        return {"type": "object"}
    base = _SAME.get(path, path)
    properties = {name: _typed(kind, f"{base}.{name}", tables) for name, kind in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


def _typed(kind: str, path: str, tables: Tables) -> dict[str, Any]:
    if kind.endswith(" or null"):
        schema = _typed(kind.removesuffix(" or null"), path, tables)
        return {"anyOf": [schema, {"type": "null"}]}
    if kind in _SIMPLE:
        return {"type": kind}
    if kind == "object":
        return _object(path, tables)
    if kind == "list":
        known = _SAME.get(path, path) in tables
        return {"type": "array", "items": _object(path, tables)} if known else {"type": "array"}
    if kind == "listing":
        fields = {"count": {"type": "integer"}, "items": {"type": "array", "items": _object(f"{path}.items", tables)}}
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    if kind.startswith("list of "):
        return {"type": "array"} | _listed(kind.removeprefix("list of "), path, tables)
    # What else there is is said in words.
    return {}


def _listed(kind: str, path: str, tables: Tables) -> dict[str, Any]:
    if kind.startswith("lists of "):
        return {"items": {"type": "array"} | _listed(kind.removeprefix("lists of "), path, tables)}
    count = {"minItems": 2, "maxItems": 2} if kind.startswith("two ") else {}
    plural = kind.removeprefix("two ")
    return {"items": {"type": _PLURALS[plural]}, **count}


def main() -> None:
    """Write ``schemas/*.json``."""
    for name, schema in schemas((DOCS / "reports.md").read_text(encoding="utf-8")).items():
        (DOCS / "schemas" / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
