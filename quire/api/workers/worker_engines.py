"""WorkerEngines: the engines of an API process's job, as the one that its requests use.

Imports supervision and data parallelism only where the job has them. Always holds: an engine keeps
its number in all API processes, since what they share for routing is by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.api.workers.ordered_successors import OrderedSuccessors
from quire.api.workers.worker_job import EngineJob, WorkerJob
from quire.base.log import Log
from quire.config.server_config import ServerConfig
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import SharedEngine, config_from_json

if TYPE_CHECKING:
    from quire.engine.data_parallel.data_parallel_engine import ComingEngine, DataParallelEngine
    from quire.engine.data_parallel.member import MemberEngine
    from quire.engine.supervised.supervised_engine import SupervisedEngine


class WorkerEngines:
    """ordered: what receives the supervisor's orders about an engine, by its number."""

    def __init__(
        self,
        job: WorkerJob,
        server: ServerConfig,
        log: Log,
        report: Callable[[str, Any], None],
    ) -> None:
        self.ordered: dict[int, SharedEngine | OrderedSuccessors] = {}
        self._job = job
        self._server = server
        self._log = log
        self._report = report

    def served(self) -> MemberEngine | DataParallelEngine:
        """Return the engine of all requests."""
        running: dict[int, MemberEngine] = {}
        coming: dict[int, ComingEngine] = {}
        for one in self._job.engines:
            if one.folder:
                running[one.number] = self._running(one)
            else:
                successors = self._successors(one, None)
                coming[one.number] = partial(_joined, successors, self._log)
        if not self._job.routing:
            return running[0]
        return self._one_of_several(running, coming)

    def _running(self, one: EngineJob) -> MemberEngine:
        config = config_from_json(one.config)
        engine = SharedEngine(Path(one.folder), self._job.number)
        client = EngineClient.attach(engine, config, watchdog_s=self._server.watchdog_s)
        if not self._server.restart_engine:
            self.ordered[one.number] = engine
            return client
        return _supervised(client, self._successors(one, engine), self._log)

    def _successors(self, one: EngineJob, engine: SharedEngine | None) -> OrderedSuccessors:
        successors = OrderedSuccessors(
            engine,
            self._job.number,
            config_from_json(one.config),
            self._report,
            num_restarts=one.restarts,
            watchdog_s=self._server.watchdog_s,
        )
        self.ordered[one.number] = successors
        return successors

    def _one_of_several(
        self, running: Mapping[int, MemberEngine], coming: Mapping[int, ComingEngine]
    ) -> DataParallelEngine:
        from quire.engine.data_parallel.data_parallel_engine import DataParallelEngine
        from quire.engine.data_parallel.past_totals import PastTotals
        from quire.engine.data_parallel.shared_routing import SharedRouting

        routing = SharedRouting(Path(self._job.routing), self._job.slot)
        routing.forget_process(self._job.slot)
        past = PastTotals(Path(self._job.home))
        return DataParallelEngine(running, self._log, routing=routing, past=past, coming=coming)


def _supervised(client: EngineClient, successors: OrderedSuccessors, log: Log) -> SupervisedEngine:
    from quire.engine.supervised.supervised_engine import SupervisedEngine

    return SupervisedEngine(client, successors, log)


async def _joined(successors: OrderedSuccessors, log: Log) -> MemberEngine:
    """Wait for an engine that is being started again."""
    engine = _supervised(
        await successors.next("it ended before this process began"), successors, log
    )
    await engine.ready()
    return engine
