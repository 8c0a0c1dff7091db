"""Tests of this folder need schemathesis (`make fuzz` installs it); without it there are none."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("schemathesis") else ["test_api.py"]
