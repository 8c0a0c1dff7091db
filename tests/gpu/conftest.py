"""Collect nothing without PyTorch and Triton: the default suite needs neither.

`make gpu` installs both.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

IS_INSTALLED = find_spec("torch") is not None and find_spec("triton") is not None
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]

if IS_INSTALLED:
    import torch

    from bench.gpu.interpreter import mend

    mend()

    @pytest.fixture(autouse=True)
    def new_memory_holds_rubbish() -> Iterator[None]:
        """Fill the memory of torch.empty with NaN or the largest integers, so that reads of
        uninitialized memory show, including the scratch buffers of launchers.
        """
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)
