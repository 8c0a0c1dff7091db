"""A server with ranks as actors of a Ray cluster of two nodes on this machine: it answers as one
process, a lost node ends it with the reason, and it can be started again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.ray_nodes import Nodes, nodes
from tests.serve.running_server import RunningServer, engines_of, kill
from tests.serve.test_launched import SMALL, TIER, check_tier
from tests.serve.test_ranks import COMPLETIONS, LONG
from tests.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

RAY = ("--distributed-executor-backend", "ray", "--distributed-timeout-seconds", "60")
STAGES = ("-pp", "2", *RAY)
ASKED = {"prompt": "abc", "max_tokens": 20, "logprobs": 5, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads and layers for two."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("models") / "even"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=32768, **heads)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """A cluster of two nodes with a CPU each."""
    with nodes(2) as made:
        yield made


def answer_of(server: RunningServer) -> dict[str, object]:
    """Return tokens, log-probabilities and fingerprint of an answer."""
    status, answer = server.post(COMPLETIONS, ASKED)
    assert status == 200, answer
    return {"choices": answer["choices"], "fingerprint": answer["system_fingerprint"]}


@pytest.mark.parametrize("flags", [STAGES, ("-tp", "2", *RAY)], ids=["two stages", "two ranks"])
def test_ranks_on_two_nodes_answer_as_one_process(
    model: Path, cluster: Nodes, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Also blocks that have been in a disk tier."""
    with RunningServer(model, *SMALL) as alone:
        wanted = answer_of(alone)
    tier = (*SMALL, *TIER, "--kv-tier-path", str(tmp_path / "tier"))
    with RunningServer(model, *flags, *tier, fresh=True, environment=cluster.environment) as server:
        assert answer_of(server) == wanted
        assert "nodes=2" in server.stderr()
        check_tier(server)


def test_ranks_of_torch_tensors_on_two_nodes_answer_as_one_process(
    model: Path, cluster: Nodes, tmp_path: Path
) -> None:
    """Skipped without PyTorch, which neither Ray nor its test environment needs."""
    pytest.importorskip("torch")
    asked = (*SMALL, "--executor", "torch", "--device", "cpu")
    with RunningServer(model, *asked, fresh=True) as alone:
        wanted = answer_of(alone)
    tier = (*TIER, "--kv-tier-path", str(tmp_path / "tier"))
    flags = ("-tp", "2", *RAY, *asked, *tier)
    with RunningServer(model, *flags, fresh=True, environment=cluster.environment) as server:
        assert answer_of(server) == wanted
        check_tier(server)


def test_a_lost_node_ends_open_streams_with_its_reason_and_a_new_start_works(
    model: Path, cluster: Nodes
) -> None:
    with RunningServer(model, *STAGES, fresh=True, environment=cluster.environment) as server:
        with server.stream(COMPLETIONS, LONG) as first, server.stream(COMPLETIONS, LONG) as second:
            first.next()
            second.next()
            cluster.kill_last()
            for reader in (first, second):
                *_, last = reader
                assert last["error"]["code"] == "device_lost"
        assert server.exit_code() == 1
        assert "rank 1" in server.stderr()
    cluster.add()
    with RunningServer(model, *STAGES, fresh=True, environment=cluster.environment) as server:
        assert server.post(COMPLETIONS, ASKED)[0] == 200


def test_an_engine_that_is_started_again_has_new_actors(model: Path, cluster: Nodes) -> None:
    flags = (*STAGES, "--restart-engine")
    with RunningServer(model, *flags, fresh=True, environment=cluster.environment) as server:
        before = answer_of(server)
        cluster.kill_last()
        cluster.add()
        server.until(lambda: _is_ready(server), "the engine is started again")
        assert answer_of(server) == before


def _is_ready(server: RunningServer) -> bool:
    try:
        status, _, body = server.request("POST", COMPLETIONS, {**ASKED, "max_tokens": 1})
    except OSError:
        return False
    return status == 200 and bool(json.loads(body)["choices"])


def test_a_cluster_without_room_is_refused(model: Path, cluster: Nodes) -> None:
    flags = ("-pp", "2", "--threads", "2", "--distributed-executor-backend", "ray")
    server = RunningServer(
        model,
        *flags,
        *("--distributed-timeout-seconds", "3"),
        wait=False,
        environment=cluster.environment,
    )
    assert server.exit_code() != 0
    assert "the Ray cluster has no 2 free CPUs for each of 2 ranks" in server.stderr()
    server.kill()


def test_a_model_that_other_nodes_do_not_have_is_refused(cluster: Nodes) -> None:
    server = RunningServer("/no/such/model", *STAGES, wait=False, environment=cluster.environment)
    assert server.exit_code() != 0
    assert "/no/such/model" in server.stderr()
    server.kill()


def test_no_cluster_is_refused(model: Path) -> None:
    server = RunningServer(model, *STAGES, wait=False, environment={"RAY_ADDRESS": "127.0.0.1:1"})
    assert server.exit_code() != 0
    assert "the cluster at 127.0.0.1:1 cannot be joined" in server.stderr()
    server.kill()


def test_engines_of_a_server_have_ranks_on_both_nodes_and_outlive_one_of_them(
    model: Path,
) -> None:
    """Of each engine one stage is here and the other elsewhere, whichever reserves first. A node
    that is lost takes both engines with it; both come back."""
    with RunningServer(model, *SMALL) as alone:
        wanted = answer_of(alone)
        story = alone.post(COMPLETIONS, {**ASKED, "prompt": "cab " * 40})[1]["choices"]
    flags = (*STAGES, *SMALL, "--data-parallel-size", "2", "--restart-engine")
    with (
        nodes(2, cpus=2) as cluster,
        RunningServer(model, *flags, fresh=True, environment=cluster.environment) as server,
    ):
        assert answer_of(server) == wanted
        assert server.post(COMPLETIONS, {**ASKED, "prompt": "cab " * 40})[1]["choices"] == story
        assert server.stderr().count("nodes=2") == 2
        first, second = engines_of(server)
        kill(first)
        assert answer_of(server) == wanted
        server.until(lambda: server.stderr().count("nodes=2") == 3, "the engine is started again")
        assert second in engines_of(server)
        cluster.kill_last()
        cluster.add()
        server.until(lambda: server.stderr().count("nodes=2") == 5, "both are started again")
        server.until(lambda: _is_ready(server), "they answer")
        assert answer_of(server) == wanted
