"""How much memory a device has for an engine, and whether the sum came out.

Before anything is loaded the device is asked what is free; quire/config/memory.py makes the sum of
it, which is printed. Afterwards what is really left is compared with what the sum said. Knows no
program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.base.errors import CapacityError, SettingError
from quire.config.machine import MachineMemory, machine_memory
from quire.config.memory import mib
from quire.execute.gpu.device import first_line
from quire.execute.gpu.limits import GPU_RESERVE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes free on a device now, and the text that names the device."""

    free_bytes: int
    limit: str


def device_memory(device: torch.device) -> MachineMemory:
    """Return what an engine may take there."""
    if device.type == "cpu":
        return machine_memory()
    give_back(device)  # what an engine before this one had in this process
    try:
        free_bytes, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # the first call that takes something of the card
        raise SettingError(
            f"{device} is there and cannot be worked with: {first_line(error)}. Another process "
            "may have it for itself, or hold all of its memory (nvidia-smi shows which); take "
            "another card (--device cuda:N), or end that process"
        ) from error
    return planned(DeviceMemory(free_bytes=free_bytes, limit=f"memory of {device}"))


def give_back(device: torch.device) -> None:
    """To the device, what PyTorch keeps of it for later: others may need it, kernels and graphs
    too, and what is free in pieces may be whole."""
    if device.type != "cpu" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def planned(memory: DeviceMemory) -> MachineMemory:
    """Return a device's free memory as the sum takes it."""
    return MachineMemory(
        available_bytes=max(memory.free_bytes - GPU_RESERVE_BYTES, 0),
        limit=f"{memory.limit} without {mib(GPU_RESERVE_BYTES)} for libraries and graphs",
        is_own=True,
    )


def check_left(device: torch.device, *, free_bytes: int | None = None) -> str:
    """After loading: a line that says what is left. Raises CapacityError where it is too little for
    a step to run. free_bytes: as found, for tests."""
    if device.type != "cuda":
        return ""
    left = torch.cuda.mem_get_info(device)[0] if free_bytes is None else free_bytes
    if left < GPU_RESERVE_BYTES // 4:
        raise CapacityError(
            f"{device}: {mib(left)} are left beside weights, buffers and KV cache, and at least "
            f"{mib(GPU_RESERVE_BYTES // 4)} are needed for libraries and graphs: another "
            "process took memory meanwhile, or the sum above is wrong; lower --kv-cache-memory"
        )
    return f"{device}: {mib(left)} left beside weights, buffers and KV cache"
