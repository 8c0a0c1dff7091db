"""Choose the device, and how much of its memory is saved, for the torch executor.

A part of the wiring, like executor_choice.py, and loaded for that executor only. Knows the settings
and no model.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.config.launch_environment import read_launch_environment
from quire.engine.assembly.offload import offload_size

if TYPE_CHECKING:
    from quire.execute.gpu.executor_class import TorchExecutorClass
    from quire.ranks.kinds import RankKind


def torch_class(config: EngineConfig) -> TorchExecutorClass:
    """Return the executor class. Raises SettingError where its libraries are not installed."""
    settings, offload = config.executor, None
    try:
        from quire.execute.gpu.device import choose, has_fp8, look, reason
        from quire.execute.gpu.executor_class import TorchExecutorClass
    except ModuleNotFoundError as error:
        raise SettingError(
            f"executor is torch and {error.name} is not installed; install it: "
            "pip install 'quire-llm[gpu]'"
        ) from error
    except (ImportError, OSError) as error:  # a library that it was built with is not there
        raise SettingError(
            f"executor is torch and PyTorch cannot be loaded ({error}); install it anew, built for "
            "this machine's driver (pytorch.org says how)"
        ) from error
    machine, wanted = look(), settings.device or "auto"
    device = choose(wanted, machine)
    card = "" if device.type == "cpu" else machine.cards[device.index].name
    Log("engine").event(
        "computing on",
        device=str(device),
        **({"card": card} if card else {}),
        because=reason(wanted, device, machine),
    )
    if settings.cpu_offload_gb is not None:
        offload = offload_size(config, is_gpu=device.type != "cpu")
    exact = settings.numerics != "fast"
    return TorchExecutorClass(
        device,
        exact=exact,
        has_fp8=has_fp8(device, machine),
        captures=not settings.enforce_eager,
        offload=offload,
    )


def torch_ranks(config: EngineConfig) -> RankKind:
    """Return what several ranks compute with. Raises SettingError."""
    one, settings = torch_class(config), config.executor
    from quire.ranks.torch_kind import ranks_like  # behind what says that PyTorch is missing

    num_here = settings.num_ranks
    if settings.distributed_executor_backend == "external_launcher":
        num_here = read_launch_environment(os.environ).local_world_size
    elif settings.distributed_executor_backend == "ray" and one.device.type != "cpu":
        raise SettingError(
            f"{settings.ranks_text}, on GPUs, and distributed_executor_backend is ray, which "
            "places ranks by their CPUs for now: take mp on one machine, external_launcher "
            "(torchrun, srun) on several, or --device cpu"
        )
    return ranks_like(
        one,
        num_ranks=settings.num_ranks,
        of_stage=settings.ranks_of_stage,
        num_here=num_here,
        asked=settings.ranks_text,
    )
