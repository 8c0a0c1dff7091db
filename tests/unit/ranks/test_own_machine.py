"""What a rank of another machine has of its own: its GPU, and that its group is there with it."""

from __future__ import annotations

import pytest

from quire.base.errors import SettingError
from quire.ranks.connected import OwnMachine
from quire.ranks.start import RankStart


def start_of(rank: int, *, degree: int, stages: int, device: str, transport: str) -> RankStart:
    return RankStart(
        rank=rank,
        degree=degree,
        stages=stages,
        version="",
        program={},
        checkpoint="/model",
        limits={},
        num_threads=1,
        isa="",
        cpus=(),
        pack_cache=None,
        slot_bytes=0,
        message_bytes=0,
        timeout_s=1.0,
        log_level="info",
        log_form="text",
        poison=False,
        torch={"device": device, "transport": transport},
    )


@pytest.mark.parametrize(
    ("rank", "local", "given", "own"), [(1, 1, 4, 4), (2, 0, 2, 0), (3, 1, 3, 1), (3, 1, 5, 3)]
)
def test_a_rank_has_the_gpu_of_its_number_on_its_machine(
    rank: int, local: int, given: int, own: int
) -> None:
    start = start_of(rank, degree=4, stages=2, device=f"cuda:{given}", transport="nccl")
    found = OwnMachine(local_rank=local, local_ranks=2).start_of(start)
    assert found.torch == {"device": f"cuda:{own}", "transport": "nccl"}


@pytest.mark.parametrize(
    ("rank", "local", "here"),
    [
        (1, 0, 2),  # numbered by turns: ranks 0 and 2 are here, 1 and 3 there
        (2, 1, 2),
        (2, 0, 1),  # two ranks on the first machine, one on each of the others
        (3, 0, 1),
    ],
)
def test_gpus_of_several_machines_do_not_gather_by_nccl(rank: int, local: int, here: int) -> None:
    machine = OwnMachine(local_rank=local, local_ranks=here)
    start = start_of(rank, degree=4, stages=2, device=f"cuda:{rank}", transport="nccl")
    with pytest.raises(SettingError, match="machine by machine"):
        machine.start_of(start)
    other = start_of(rank, degree=4, stages=2, device="cpu", transport="host")
    assert machine.start_of(other).torch == {"device": "cpu", "transport": "host"}
