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

    @pytest.fixture(autouse=True)
    def threads_stay_as_they_were() -> Iterator[None]:
        """Restore the number of PyTorch's threads, which an engine sets for its process: the last
        bits of a product on the CPU, a stand-in for the GPU's, depend on it.
        """
        num_threads = torch.get_num_threads()
        yield
        torch.set_num_threads(num_threads)
