"""Ranks by the variables of Slurm and MPI, as their launchers set them, and lists of hosts."""

from __future__ import annotations

import pytest

from quire.base.errors import SettingError
from quire.config.launch_environment import read_launch_environment
from quire.config.launchers import hosts_of, tasks_of_nodes, with_launcher

# As srun sets them for the fourth task of `srun --nodes 2 --ntasks 4 --ntasks-per-node 2`.
SLURM = {
    "SLURM_JOB_ID": "812345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
WHERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_slurm_says_all_of_a_rank() -> None:
    own = read_launch_environment(SLURM)
    assert (own.rank, own.world_size, own.local_rank, own.local_world_size) == (3, 4, 1, 2)
    assert own.host == "node07"
    others = {name: value for name, value in SLURM.items() if "NODEID" not in name}
    first = read_launch_environment(others | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert (first.host, first.port) == (own.host, own.port), "the same at all ranks"
    assert 1024 < own.port < 32768, "no port that systems give clients"


def test_nodes_of_different_numbers_of_tasks() -> None:
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    own = read_launch_environment(uneven)
    assert (own.local_rank, own.local_world_size) == (0, 1)


def test_open_mpi_and_hydra_say_all_but_the_address() -> None:
    own = read_launch_environment(OPEN_MPI | {"MASTER_PORT": "29500"})
    assert (own.rank, own.world_size, own.local_rank, own.local_world_size) == (1, 2, 1, 2)
    assert own.is_loopback, "all ranks are on this machine"
    apart = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(SettingError, match="MASTER_ADDR, MASTER_PORT are not set"):
        read_launch_environment(apart)
    # Within a job of Slurm, which has its own numbers of mpirun's processes.
    own = read_launch_environment(SLURM | HYDRA | WHERE)
    assert (own.rank, own.world_size, own.local_rank, own.local_world_size) == (2, 3, 0, 1)
    assert own.host == "10.0.0.1"


def test_what_is_set_by_hand_or_by_torchrun_stays() -> None:
    by_hand = SLURM | WHERE
    own = read_launch_environment(by_hand)
    assert (own.host, own.port, own.rank) == ("10.0.0.1", 29500, 3)
    torchrun = by_hand | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    own = read_launch_environment(torchrun)
    assert (own.rank, own.world_size, own.local_world_size) == (1, 2, 1)
    assert with_launcher({"PATH": "/bin", "RANK": ""}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("login", ["login"]),
        ("a[1-2],b,c[09-10]-ib", ["a1", "a2", "b", "c09-ib", "c10-ib"]),
        ("rack1-n5,rack1-n6", ["rack1-n5", "rack1-n6"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert hosts_of(text, "SLURM_NODELIST") == hosts


@pytest.mark.parametrize(
    "text", ["node[3-1]", "node[a-b]", "node[1", "a,,b", "", "node[]", "n[0-9999999999]", "a]b"]
)
def test_a_list_of_hosts_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match=r"SLURM_NODELIST is .*set MASTER_ADDR, RANK"):
        hosts_of(text, "SLURM_NODELIST")


def test_lists_of_tasks() -> None:
    assert tasks_of_nodes("2(x3),1", "SLURM_TASKS_PER_NODE") == [2, 2, 2, 1]
    for text in ("", "2x3", "2(x)", "-1", "1(x99999999)"):
        with pytest.raises(SettingError, match="SLURM_TASKS_PER_NODE"):
            tasks_of_nodes(text, "SLURM_TASKS_PER_NODE")
