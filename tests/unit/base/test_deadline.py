"""A block that waits ends at its deadline, with the caller's error."""

from __future__ import annotations

import asyncio

import pytest

from bench.router.virtual_time import run_virtual
from quire.base.deadline import until_deadline
from quire.base.errors import QuireError, TimedOut


def _late() -> QuireError:
    return TimedOut(f"it is {asyncio.get_running_loop().time():g}")


def test_a_block_ends_at_its_deadline_with_the_error_of_that_time() -> None:
    async def wait(deadline_s: float) -> None:
        async with until_deadline(deadline_s, _late):
            await asyncio.sleep(1000.0)

    async def story() -> None:
        now_s = asyncio.get_running_loop().time()
        for deadline_s in (now_s + 5.0, now_s - 5.0):
            wanted_s = max(now_s + 5.0, deadline_s)
            with pytest.raises(TimedOut) as caught:
                await wait(deadline_s)
            assert str(caught.value) == f"it is {wanted_s:g}"
            assert caught.value.__suppress_context__

    run_virtual(story())


def test_a_block_in_time_and_one_without_a_deadline_are_as_without() -> None:
    async def story() -> None:
        for left_s in (None, 5.0):
            now_s = asyncio.get_running_loop().time()
            async with until_deadline(None if left_s is None else now_s + left_s, _late):
                await asyncio.sleep(1.0)

    run_virtual(story())


def test_a_timeout_of_the_block_itself_is_passed_on() -> None:
    async def story() -> None:
        deadline_s = asyncio.get_running_loop().time() + 5.0
        with pytest.raises(TimeoutError, match="its own"):
            async with until_deadline(deadline_s, _late):
                raise TimeoutError("its own")
        with pytest.raises(TimeoutError):
            async with until_deadline(deadline_s, _late), asyncio.timeout(1.0):
                await asyncio.sleep(3.0)

    run_virtual(story())
