"""A server of two stages: it answers, and a lost rank ends it with errors on all open streams."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from quire.config.machine import num_usable_cores
from tests.serve.running_server import RunningServer, alive
from tests.serve.test_ranks import COMPLETIONS, check_lost_rank, rank_pid
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.skipif(num_usable_cores() < 2, reason="two ranks need two cores")

STAGES = ("--pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers."""
    folder = tmp_path_factory.mktemp("models") / "layered"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=32768)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
def test_a_lost_stage_is_an_error_of_every_open_stream_and_a_failed_exit(
    layered: Path, number: signal.Signals
) -> None:
    check_lost_rank(layered, STAGES, number)


def test_a_stage_lost_while_idle_ends_the_server_and_none_outlives_it(layered: Path) -> None:
    with RunningServer(layered, *STAGES) as server:
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
        rank = rank_pid(server.engine_pid)
        os.kill(rank, signal.SIGKILL)
        assert server.exit_code() == 1
    with RunningServer(layered, *STAGES) as server:
        engine = server.engine_pid
        rank = rank_pid(engine)
        os.kill(engine, signal.SIGKILL)
        assert server.exit_code() == 1
        server.until(lambda: not alive(rank), "the rank ends")
