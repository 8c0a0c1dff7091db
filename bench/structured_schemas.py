"""Random schemas that bound the length of every answer: strings, lists and numbers.

So every model's answer must end: a truncated answer is a fault of the engine, or max_tokens is too
small. Independent of models and grammars.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "is_here", "colour", "tags", "owner", "size", "notes", "when", "kind")
_WORDS = ("red", "green", "blue", "cat", "dog", "yes", "no", "a ball", "Zoë", 'say "hi"')
_PATTERNS = ("^[A-Z][a-z]{1,8}$", "^[0-9]{2}:[0-9]{2}$", "^(ab|cd){1,3}$")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Return an object schema with one to four properties, nested at most twice."""
    return _object(rng, levels=2)


def _object(rng: random.Random, levels: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, levels - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, levels: int) -> dict[str, Any]:
    makers = [_text, _whole, _enum, _simple, _number, _either]
    if levels > 0:
        makers += [_list, lambda rng, levels: _object(rng, levels)]
    return rng.choice(makers)(rng, levels)


def _text(rng: random.Random, levels: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(("date", "uuid", "ipv4"))}
    return {"type": "string", "minLength": rng.choice((0, 3)), "maxLength": rng.choice((8, 20))}


def _whole(rng: random.Random, levels: int) -> dict[str, Any]:
    least = rng.choice((-5, 0, 1, 18))
    return {"type": "integer", "minimum": least, "maximum": least + rng.choice((1, 99, 5000))}


def _number(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice((5, 10))}


def _enum(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"enum": [*rng.sample(_WORDS, rng.randint(1, 4)), rng.choice((1, None, True))]}


def _simple(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null"))}


def _either(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"anyOf": [_whole(rng, levels), _text(rng, levels), _simple(rng, levels)]}


def _list(rng: random.Random, levels: int) -> dict[str, Any]:
    items = _value(rng, levels - 1)
    return {"type": "array", "items": items, "minItems": rng.choice((0, 1)), "maxItems": 3}
