"""Schemas of custom resources as JSON Schema that refuses unknown keys.

A CustomResourceDefinition has an OpenAPI schema; the API server prunes unknown keys silently, so a
misspelt one is lost. Knows no manifest.
"""

from __future__ import annotations

from typing import Any

import jsonschema

_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def strict_schema(definition: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the schema of one served version of a CustomResourceDefinition."""
    [found] = [one for one in definition["spec"]["versions"] if one["name"] == version]
    assert found["served"], f"version {version} is not served"
    schema = _closed(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = _METADATA
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


def problems_of(resource: dict[str, Any], definition: dict[str, Any]) -> list[str]:
    """Return what is wrong with a resource, in words."""
    group, _, version = resource["apiVersion"].partition("/")
    names = definition["spec"]
    if (group, resource["kind"]) != (names["group"], names["names"]["kind"]):
        return [f"{resource['apiVersion']} {resource['kind']} is not of this definition"]
    validator = jsonschema.Draft202012Validator(strict_schema(definition, version))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)]


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that refuses unknown keys of objects with known ones."""
    found = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-kubernetes") and key not in ("description", "format", "default")
    }
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("anyOf", None)
        found["type"] = ["integer", "string"]
    if "properties" in schema:
        found["properties"] = {name: _closed(one) for name, one in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _closed(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = _closed(schema["items"])
    for key in ("allOf", "anyOf", "oneOf"):
        # These restrict what `properties` describes, and close nothing themselves.
        if key in found:
            found[key] = schema[key]
    if schema.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found
