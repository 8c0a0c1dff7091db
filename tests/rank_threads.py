"""Run the ranks of a model as threads of one process: a thread per rank, results in their order.

An exception of one rank ends the others' waits and is raised here.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

from quire.comm.communicator import Communicator
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank, create_segment

Result = TypeVar("Result")
Group = TypeVar("Group", bound=Communicator)
SIZES = SegmentSizes(slot_bytes=1 << 16, message_bytes=1 << 16)


def shared_memory_ranks(
    degree: int, sizes: SegmentSizes = SIZES, timeout_s: float = 30.0
) -> list[SharedMemoryRank]:
    """Return the ends of a segment in this process."""
    segment = create_segment(degree, sizes)
    try:
        return [
            SharedMemoryRank(segment, rank=rank, degree=degree, sizes=sizes, timeout_s=timeout_s)
            for rank in range(degree)
        ]
    finally:
        os.close(segment)


def connected_ranks(
    degree: int,
    sizes: SegmentSizes = SIZES,
    timeout_s: float = 30.0,
    *,
    members: int = 0,
    link_bytes: int = 0,
) -> list[SharedMemoryRank]:
    """Return ranks with a segment of their own each, connected by sockets."""
    made, ends = [], [[-1] * degree for _ in range(degree)]
    for one, other in combinations(range(degree), 2):
        pair = socket.socketpair()
        ends[one][other], ends[other][one] = pair[0].detach(), pair[1].detach()
    for rank in range(degree):
        segment = create_segment(degree, sizes, link_bytes=link_bytes)
        try:
            made.append(
                SharedMemoryRank(
                    segment,
                    rank=rank,
                    degree=degree,
                    sizes=sizes,
                    timeout_s=timeout_s,
                    members=members,
                )
            )
        finally:
            os.close(segment)
        made[-1].native.connect(ends[rank])
    return made


def on_all_ranks(groups: Sequence[Group], call: Callable[[Group], Result]) -> list[Result]:
    """Return what `call` returns on each rank."""
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run(group: Group) -> None:
        try:
            results[group.rank] = call(group)
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(groups))]
