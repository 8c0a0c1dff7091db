"""Syntax trees of all sources are millions of objects: they are not traversed as garbage, and are
freed after the last test of this directory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.repository import source_files


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Collect no garbage while trees are made; they have no cycles."""
    gc.disable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage again, and drop the trees where no test of this directory follows."""
    gc.enable()
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        source_files.nodes_of.cache_clear()
        source_files.tree_of.cache_clear()
