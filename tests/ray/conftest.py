"""Collect nothing without Ray: the default suite does not need it. `make ray` installs it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") is not None else ["test_*.py"]
