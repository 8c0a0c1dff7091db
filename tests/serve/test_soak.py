"""Many clients at once, misbehaving ones among them: answers are right and resources are released.

The short form of `python -m bench.soak`, by counts: neither time nor memory is measured.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.frontend.servers import Child
from bench.soak.__main__ import asked_alone, bodies
from bench.soak.callers import Callers
from bench.soak.holdings import idle
from tests.serve.preloaded import forked_children

NUM_CALLERS, THINGS_EACH = 50, 3


def test_after_clients_of_all_kinds_answers_are_right_and_nothing_is_held(tmp_path: Path) -> None:
    tasks_file = tmp_path / "tasks"
    flags = ("--port", "0", "--threads", "1", "--max-num-seqs", "16", "--stall-seconds", "1")
    with forked_children(), Child("bench.soak.server", str(tasks_file), *flags) as server:
        asks = asyncio.run(asked_alone(server.port, bodies(seed=3)[:8]))
        callers = Callers(server.port, asks, seed=5, stall_s=0.5)
        asyncio.run(callers.run(NUM_CALLERS, lambda done: done < 1))
        before = idle(server, tasks_file)
        asyncio.run(callers.run(NUM_CALLERS, lambda done: done < THINGS_EACH))
        after = idle(server, tasks_file, before)
    assert callers.wrong == []
    assert sum(callers.done.values()) == NUM_CALLERS * (1 + THINGS_EACH)
    assert set(callers.done) == {"good", "whole", "vanish", "stall", "rubbish"}
    assert (after.blocks, after.open_requests, after.engine_requests) == (0, 0, 0)
    assert after.beyond(before) == []
