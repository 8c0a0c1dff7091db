"""Counting before parsing: exact outside strings, and rejection before anything is built."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.api.http import json_bounds
from quire.api.http import request_io as body
from quire.api.http.json_bounds import excess
from quire.api.http.request_io import parse
from quire.base import json_strings
from quire.base.errors import RequestError

LIMIT = 1 << 24
FLOODS: dict[str, Callable[[], bytes]] = {  # 8 MB each, made when they are sent
    "arrays": lambda: b"[" + b"[]," * 2_600_000 + b"[]]",
    "objects": lambda: b"[" + b"{}," * 2_600_000 + b"{}]",
    "strings": lambda: b"[" + b'"",' * 2_600_000 + b'""]',
    "numbers": lambda: b"[" + b"1," * 4_000_000 + b"1]",
    "literals": lambda: b"[" + b"null," * 1_600_000 + b"null]",
    "keys": lambda: b"{" + b",".join(b'"%d":0' % i for i in range(600_000)) + b"}",
}


@pytest.mark.parametrize("case", FLOODS)
def test_a_flood_is_rejected_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    built: list[bytes] = []
    monkeypatch.setattr(body, "parse_object", lambda raw, **_: built.append(raw))
    with pytest.raises(RequestError, match=r"has more than [0-9]+ "):
        parse(b'{"prompt":' + FLOODS[case]() + b"}", limit_bytes=LIMIT)
    assert not built


def test_the_longest_prompts_are_accepted() -> None:
    ids = json.dumps({"prompt": list(range(1_100_000))}).encode()
    assert len(parse(ids, limit_bytes=LIMIT)["prompt"]) == 1_100_000
    text = "[{,}] \\" * 900_000 + '"'
    assert parse(json.dumps({"prompt": text}).encode(), limit_bytes=LIMIT) == {"prompt": text}


def counted(document: Any) -> tuple[int, int, int]:
    """Return (arrays and objects, strings, values and keys less the objects' own) of a document."""
    containers = strings = commas = 0
    waiting = [document]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list | dict):
            containers += 1
            commas += max(len(item) - 1, 0)
            strings += len(item) if isinstance(item, dict) else 0
            waiting += item.values() if isinstance(item, dict) else item
        elif isinstance(item, str):
            strings += 1
    return containers, strings, commas + containers


def drawn(random_: random.Random, depth: int) -> Any:
    """Draw a document with strings full of quotes, backslashes, brackets and commas."""
    if depth and random_.random() < 0.6:
        entries = [drawn(random_, depth - 1) for _ in range(random_.randrange(5))]
        if random_.random() < 0.5:
            return entries
        return {f"{i}{drawn_text(random_)}": entry for i, entry in enumerate(entries)}
    return drawn_text(random_) if random_.random() < 0.7 else random_.choice([1, None, 2.5, True])


def drawn_text(random_: random.Random) -> str:
    return "".join(random_.choices('\\\\\\"[]{},:a\u00e9', k=random_.randrange(12)))


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64 * 1024])
def test_only_what_is_outside_of_strings_is_counted(
    monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    monkeypatch.setattr(json_strings, "SLICE_BYTES", slice_bytes)
    names = ("MAX_CONTAINERS", "MAX_STRINGS", "MAX_VALUES")
    for seed in range(60):
        document = [drawn(random.Random(seed), 5)]
        raw = json.dumps(document, ensure_ascii=seed % 2 == 0).encode()
        counts = counted(document)
        for name, count in zip(names, counts, strict=True):
            monkeypatch.setattr(json_bounds, name, count)
        assert excess(raw) is None
        for name, count in zip(names, counts, strict=True):
            if count:
                monkeypatch.setattr(json_bounds, name, count - 1)
                assert excess(raw) is not None
                monkeypatch.setattr(json_bounds, name, count)
