"""Collect the tests of this directory only if schemathesis is installed (`make fuzz`
installs it).
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("schemathesis") else ["test_api.py"]
