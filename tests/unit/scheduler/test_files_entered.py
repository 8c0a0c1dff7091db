"""A plain request enters only the core of the scheduler: disabled features do not run."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from quire.config.groups import EngineConfig
from quire.engine.assembly.scheduler_factory import make_scheduler, scheduler_limits
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.test_effort import result_of

FOLDER = "/quire/scheduler/"
MAX_FILES = 12


def test_a_streamed_chat_under_the_default_config_enters_at_most_12_files() -> None:
    config = EngineConfig(model="any")
    limits = scheduler_limits(
        config.scheduler, num_blocks=256, max_model_len=1024, step_tokens=512, num_layers=4
    )
    scheduler = make_scheduler(
        config, limits, num_blocks=256, fingerprint="", hash_key=bytes(range(16))
    )
    entered: dict[str, None] = {}

    def tracer(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and FOLDER in name:
            entered[name.split(FOLDER)[1]] = None

    before, now_ms, num_tokens = sys.getprofile(), 1.0, 0
    sys.setprofile(tracer)
    try:
        scheduler.add(make_request("chat", list(range(40)), max_tokens=20, stop_ids=(900,)))
        while scheduler.has_work:
            now_ms += 5.0
            assert not scheduler.expire(now_ms)
            plan = scheduler.schedule(now_ms)
            assert plan is not None
            outputs = scheduler.update(plan, result_of(plan), now_ms + 4.0)
            scheduler.stats()
            num_tokens += len(outputs.token_ids) + sum(len(e.token_ids) for e in outputs.events)
    finally:
        sys.setprofile(before)
    print(*entered, sep="\n")
    assert num_tokens == 20
    assert len(entered) <= MAX_FILES, list(entered)
