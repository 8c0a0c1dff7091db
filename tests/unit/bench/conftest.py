"""Smaller memory reads: the tests check reports of the machine's rates, not the rates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.bench import reading


@pytest.fixture(autouse=True, scope="session")
def small_read_block() -> Iterator[None]:
    """Read 64 MiB instead of 1 GiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_BYTES", 64 << 20)
        yield
