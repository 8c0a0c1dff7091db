"""Runs one engine from its config to its end, in whatever thread or process calls it.

`run_engine` is an edge: what goes wrong in it is sent to the client as Failed; its `emit` may be
called in several threads at once. Knows no event loop, no thread and no sockets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from quire.base.clock import Clock
from quire.base.errors import QuireError
from quire.base.report import Report
from quire.config.groups import EngineConfig
from quire.config.process_limits import out_of_memory
from quire.engine.assembly.assemble import assemble
from quire.engine.core import Inbox, error_fields, serve
from quire.engine.process.heartbeat import Heartbeat
from quire.engine.process.messages import (
    PROTOCOL_VERSION,
    Beat,
    Failed,
    FromEngine,
    Hello,
    Loading,
    Outputs,
    Ready,
    fault_of,
)


def run_engine(
    config: EngineConfig,
    inbox: Inbox,
    emit: Callable[[FromEngine], None],
    *,
    report: Report,
) -> bool:
    """Start, serve until Stop, end. Return False where it failed; the client has the reason."""
    clock, ending = Clock(), ExitStack()
    try:
        emit(Hello(protocol_version=PROTOCOL_VERSION, process_id=os.getpid()))
        engine = assemble(config, clock=clock, report=report, progress=_loading(emit))
        core = engine.core
        if core.grammars is not None:
            ending.callback(core.grammars.close)
        ending.callback(core.runner.close)
        ending.callback(engine.close_drafts)
        if engine.kv_events is not None:
            ending.callback(engine.kv_events.close)
        heartbeat = Heartbeat(
            core.steps,
            ops_done=engine.ops_done,
            beat=lambda ops_done: emit(Beat(ops_done=ops_done)),
        )
        ending.callback(heartbeat.close)
        if engine.trace is not None:
            emit = engine.trace.watch(emit)
            engine.trace.start()
            ending.callback(engine.trace.close)
        inbox = engine.watched(inbox)
        if engine.outside is not None:
            blocks = engine.outside.blocks
            emit, inbox = blocks.watch(emit), blocks.watched(inbox)
            ending.callback(blocks.close)
        emit(Outputs(outputs=None, stats=core.stats()))  # gauges are right before the first step
        emit(Ready(card=engine.card, notes=engine.notes))
        serve(core, inbox, emit, clock.now_ms)
        return True
    except MemoryError:
        emit(Failed(fault=fault_of(out_of_memory())))
        return False
    except Exception as error:  # noqa: BLE001  the process edge: report to the client and end
        if not isinstance(error, QuireError):  # the client gets the message, the log the traceback
            report("the engine failed", **error_fields(error))
        emit(Failed(fault=fault_of(error)))
        return False
    finally:
        ending.close()


def _loading(emit: Callable[[FromEngine], None]) -> Callable[[int, int], None]:
    """Progress of packing as messages, one a percent at most."""
    last_percent = -1

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_percent
        percent = done_bytes * 100 // max(total_bytes, 1)
        if percent != last_percent:
            last_percent = percent
            emit(Loading(done_bytes=done_bytes, total_bytes=total_bytes))

    return progress
