"""Values of GGUF metadata as a configuration has them.

Metadata keeps numbers as float32 where config.json had decimals: the shortest decimal that rounds
to the same float32 is what the file was made from, so that 1e-05 is 1e-05 again. Short arrays
become lists; vocabularies are left where they lie. Knows no key and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.base.gguf_file import GgufArray

MAX_LIST = 10_000  # entries: one a layer, and more is none


def decimal(value: float) -> float:
    """Return the shortest decimal that rounds to the float32 `value`; what is no float32 stays."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def plain_values(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries with keys that begin with `prefix`, without it."""
    return {
        key.removeprefix(prefix): _plain(value)
        for key, value in metadata.items()
        if key.startswith(prefix)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return decimal(value)
    if not isinstance(value, GgufArray):
        return value
    if value.holds_texts or value.count > MAX_LIST:
        return f"an array of {value.count} entries"
    return [_plain(entry) for entry in value.numbers().tolist()]
