"""Without PyTorch and Triton nothing here can be imported, and so nothing is collected: the default
suite needs neither. `make gpu` installs both."""

from __future__ import annotations

from importlib.util import find_spec

IS_INSTALLED = find_spec("torch") is not None and find_spec("triton") is not None
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]

if IS_INSTALLED:
    from bench.gpu.interpreter import mend

    mend()
