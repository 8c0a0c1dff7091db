"""A server of two ranks: it answers, and a lost rank ends it with errors on all open streams,
whatever the ranks divide: products, whole experts or the positions of the KV cache."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from quire.config.machine import num_usable_cores
from tests.models.cases_experts import QWEN3_MOE
from tests.serve.running_server import RunningServer, alive, children_of
from tests.tiny_models import write_tiny, write_tiny_llama

pytestmark = pytest.mark.skipif(num_usable_cores() < 2, reason="two ranks need two cores")

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 30_000, "stream": True, "ignore_eos": True}
RANKS = ("--tensor-parallel-size", "2")
# What two ranks divide, beside the model's products; whole experts need a mixture.
LAYOUTS = {
    "TP 2": RANKS,
    "EP 2": (*RANKS, "--enable-expert-parallel"),
    "CP 2": ("--context-parallel-size", "2"),
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768}


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads for two ranks."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "even", seed=5, **HEADS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with heads for two ranks."""
    config = QWEN3_MOE | HEADS | {"vocab_size": 300}
    return write_tiny(tmp_path_factory.mktemp("models") / "mixture", config, seed=6)


def rank_pid(engine: int) -> int:
    """Return the process of rank 1: the engine's only child."""
    (pid,) = children_of(engine)
    return pid


def check_lost_rank(model: Path, flags: tuple[str, ...], number: signal.Signals) -> None:
    """Send a signal to rank 1 while two streams are open; all must end with the reason."""
    with RunningServer(model, *flags) as server:
        engine = server.engine_pid
        rank = rank_pid(engine)
        with server.stream(COMPLETIONS, LONG) as first, server.stream(COMPLETIONS, LONG) as second:
            first.next()
            second.next()
            os.kill(rank, number)
            for reader in (first, second):
                *_, last = reader
                assert last["error"]["code"] == "device_lost"
        assert server.exit_code() == 1
        how = "was ended by signal 9" if number is signal.SIGKILL else "does not respond"
        assert how in server.stderr()
        server.until(lambda: not alive(engine) and not alive(rank), "all processes end")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
def test_a_lost_rank_is_an_error_of_every_open_stream_and_a_failed_exit(
    number: signal.Signals, layout: str, even: Path, mixture: Path
) -> None:
    check_lost_rank(mixture if layout == "EP 2" else even, LAYOUTS[layout], number)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_lost_while_idle_ends_the_server(layout: str, even: Path, mixture: Path) -> None:
    with RunningServer(mixture if layout == "EP 2" else even, *LAYOUTS[layout]) as server:
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
        os.kill(rank_pid(server.engine_pid), signal.SIGKILL)
        assert server.exit_code() == 1


def test_ranks_end_with_the_server(even: Path) -> None:
    with RunningServer(even, *RANKS) as server:
        engine = server.engine_pid
        rank = rank_pid(engine)
        os.kill(engine, signal.SIGKILL)
        assert server.exit_code() == 1
        server.until(lambda: not alive(rank), "the rank ends")
