"""The environment in which torchrun, Slurm, MPI or a shell has started this process as one of
several ranks: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

Knows no setting beside these variables and what launchers say in place of them (launchers.py).
Always holds: numbers are within each other's limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from quire.base.errors import SettingError
from quire.config.launchers import with_launcher

_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
# Set by torchrun where its own process listens at MASTER_PORT, for the processes it starts.
_AGENT_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """host, port: where rank 0 listens. local_rank: this rank among those of its machine, of which
    there are local_world_size."""

    host: str
    port: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach rank 0."""
        return is_loopback(self.host)


def read_launch_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
    """Return the ranks of an environment. Raises SettingError for what is missing or wrong."""
    environment = with_launcher(environment)
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        raise SettingError(
            "distributed_executor_backend is external_launcher, which reads "
            f"{', '.join(_NEEDED)} and LOCAL_RANK from the environment, and "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: start the ranks "
            "with torchrun, srun or a script that sets them (mpirun sets no address and "
            "no port of rank 0), or take mp, which starts ranks by itself"
        )
    host = environment["MASTER_ADDR"]
    port = _number(environment, "MASTER_PORT", lowest=1, highest=65535)
    if environment.get(_AGENT_LISTENS) == "True":
        port = port + 1 if port < 65535 else port - 1
    world_size = _number(environment, "WORLD_SIZE", lowest=1, highest=64)
    rank = _number(environment, "RANK", lowest=0, highest=world_size - 1)
    here = world_size if is_loopback(host) else 1
    here = _number(environment, "LOCAL_WORLD_SIZE", lowest=1, highest=world_size, default=here)
    local = rank if here == world_size else 0
    local = _number(environment, "LOCAL_RANK", lowest=0, highest=here - 1, default=local)
    return LaunchEnvironment(
        host=host,
        port=port,
        rank=rank,
        world_size=world_size,
        local_rank=local,
        local_world_size=here,
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is reached from its own machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _number(
    environment: Mapping[str, str],
    name: str,
    *,
    lowest: int,
    highest: int,
    default: int | None = None,
) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if text.isascii() and text.isdigit() and lowest <= int(text) <= highest:
        return int(text)
    advice = ""
    if name == "LOCAL_RANK":
        advice = "; LOCAL_WORLD_SIZE says how many ranks this machine has (outside torchrun, 1)"
    raise SettingError(
        f"the environment variable {name} is {text!r}; a number from {lowest} to {highest} is "
        f"allowed{advice}"
    )
