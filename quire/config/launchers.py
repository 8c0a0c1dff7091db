"""What Slurm and MPI launchers say of a rank, under the names that torchrun sets.

Knows the variables of srun, of Open MPI's mpirun and of Hydra (MPICH, Intel MPI). Always holds: a
variable that is set already stays; what a launcher does not say is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from quire.base.errors import SettingError

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Ports that Slurm jobs listen at, by the number of the job: below those that systems give clients.
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_MPI = (
    # A launcher by the variable that only it sets, and its names for RANK_NAMES.
    (
        "OMPI_COMM_WORLD_RANK",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("MPI_LOCALRANKID", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
)
_HOST = re.compile(r"([^,\[\]]*)(?:\[([^\[\]]*)\])?([^,\[\]]*)(?:,|$)")
_RUN = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def with_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with what its launcher says of this rank, where RANK is not set.

    Raises SettingError where a launcher's list of hosts or tasks cannot be read.
    """
    given = {name: value for name, value in environment.items() if value}
    if "RANK" in given:
        return given
    for sign, names in _MPI:
        if sign in given:
            own = zip(RANK_NAMES, names, strict=True)
            found = {name: given[theirs] for name, theirs in own if theirs in given}
            if found.get("LOCAL_WORLD_SIZE") == found.get("WORLD_SIZE"):
                found["MASTER_ADDR"] = "127.0.0.1"
            return found | given
    return _of_slurm(given) | given if "SLURM_PROCID" in given else given


def _of_slurm(given: Mapping[str, str]) -> dict[str, str]:
    found = {"RANK": given["SLURM_PROCID"]}
    if theirs := _first_of(given, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        found["WORLD_SIZE"] = given[theirs]
    if "SLURM_LOCALID" in given:
        found["LOCAL_RANK"] = given["SLURM_LOCALID"]
    node = given.get("SLURM_NODEID", "0")
    tasks = _first_of(given, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if tasks and node.isascii() and node.isdigit():
        counts = tasks_of_nodes(given[tasks], tasks)
        if int(node) < len(counts):
            found["LOCAL_WORLD_SIZE"] = str(counts[int(node)])
    if hosts := _first_of(given, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        found["MASTER_ADDR"] = hosts_of(given[hosts], hosts)[0]
    job = given.get("SLURM_JOB_ID", "")
    if job.isascii() and job.isdigit():
        found["MASTER_PORT"] = str(_FIRST_PORT + int(job) % _NUM_PORTS)
    return found


def _first_of(given: Mapping[str, str], *names: str) -> str:
    """Return the first of the names that is set; empty: none is."""
    return next((name for name in names if name in given), "")


def hosts_of(text: str, name: str) -> list[str]:
    """Return the hosts of a list of Slurm, as node[01-03,7],login: node01, node02, node03, node7,
    login. Raises SettingError."""
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _HOST.match(text, at)
        if match is None or match.end() == at or not match[0].strip(","):
            raise _unreadable(name, text)
        before, runs, after = match.groups()
        numbers = [""] if runs is None else list(chain.from_iterable(_numbers(runs, name, text)))
        found += [f"{before}{number}{after}" for number in numbers]
        at = match.end()
    if not found:
        raise _unreadable(name, text)
    return found


def _numbers(runs: str, name: str, text: str) -> list[list[str]]:
    """Return the numbers of 01-03,7: 01, 02, 03, 7, with the zeros of the first of each run."""
    found = []
    for run in runs.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            raise _unreadable(name, text)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + (1 << 16):
            raise _unreadable(name, text)
        found.append([f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)])
    return found


def tasks_of_nodes(text: str, name: str) -> list[int]:
    """Return the tasks of each node, as 2(x3),1 gives 2, 2, 2, 1. Raises SettingError."""
    found: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or int(match[2] or 1) > 1 << 16:
            raise _unreadable(name, text)
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _unreadable(name: str, text: str) -> SettingError:
    return SettingError(
        f"the environment variable {name} is {text!r}, which is no list of Slurm (as "
        "node[01-03,7] or 2(x3),1): set MASTER_ADDR, RANK, WORLD_SIZE, LOCAL_RANK and "
        "LOCAL_WORLD_SIZE for each rank instead"
    )
