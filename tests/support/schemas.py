"""Checks JSON that distrun prints against the schemas in docs/schemas, more strictly than readers may.

Readers allow members that they do not know. Here these are errors: a member that is new has to be in the schema.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import referencing

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "schemas"


def names() -> list[str]:
    """Return the names of all schemas."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """Return a schema as it is published."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def check(value: object, name: str, part: str = "") -> None:
    """Fail with a readable message if a value does not fit a schema; `part`: a pointer into it."""
    errors = sorted(_validator(name, part).iter_errors(value), key=lambda error: list(error.absolute_path))
    assert not errors, "".join(f"\n{name}: {_text(error)}" for error in errors[:5])


def _text(error: Any) -> str:
    where = "".join(f"[{each!r}]" for each in error.absolute_path) or "all of it"
    deepest = jsonschema.exceptions.best_match([error], key=jsonschema.exceptions.relevance)
    more = (
        "" if deepest is error else f" ({''.join(f'[{e!r}]' for e in deepest.absolute_path)}: {deepest.message:.300})"
    )
    return f"{where}: {error.message:.500}{more}"


@functools.cache
def _validator(name: str, part: str) -> Any:
    resources = [(f"{each}.json", referencing.Resource.from_contents(_closed(read(each)))) for each in names()]
    registry: Any = referencing.Registry().with_resources(resources)
    return jsonschema.Draft202012Validator({"$ref": f"{name}.json{part}"}, registry=registry)


def _closed(schema: Any) -> Any:
    """Return a schema in which objects have no member that it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(each) for key, each in schema.items()}
    kinds = schema.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    if is_object and "additionalProperties" not in schema:
        found["unevaluatedProperties"] = False
    return found
