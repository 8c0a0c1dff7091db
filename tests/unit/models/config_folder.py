"""Open a configuration as a model directory would hold it, or return why it is rejected.

No weights are written. None as a change drops the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.models.registry import open_model
from quire.models.spec import ModelSpec


def opened(
    folder: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    **changes: Any,
) -> ModelSpec:
    """Return the spec of `config` with changes, beside a generation_config.json if one is given."""
    merged = {**config, **changes}
    kept = {key: merged[key] for key in merged if key not in changes or merged[key] is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return open_model(folder)


def refused(folder: Path, config: Mapping[str, Any], **changes: Any) -> str:
    """Return the error message."""
    with pytest.raises(ConfigError) as caught:
        opened(folder, config, **changes)
    return str(caught.value)
