"""Choose the executor of a config, and load only its modules.

A part of the wiring, like assemble.py. Knows the settings and which executors there are, and no
model. Always holds: one executor is imported, since each takes a noticeable part of a start.
"""

from __future__ import annotations

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.user_path import user_path
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.execute.executor import ExecutorClass
from quire.weights.pack_cache import PackCache


def choose_executor_class(config: EngineConfig) -> ExecutorClass:
    """Return the executor class. Raises SettingError where its libraries are not installed."""
    settings = config.executor
    if settings.num_ranks > 1:
        from quire.engine.assembly.ranks import ranked_class

        return ranked_class(settings, config.cache.block_size, shares_blocks=config.transfer.is_on)
    if settings.disk_offload_gb is not None:
        from quire.execute.streamed_weights import StreamingExecutorClass

        return StreamingExecutorClass(
            offload_bytes=settings.disk_offload_bytes, kv_bytes=config.cache.kv_cache_memory_bytes
        )
    if settings.executor == "native":
        from quire.execute.native import NativeExecutor

        return NativeExecutor
    if settings.executor == "torch":
        return _torch_class(config)
    from quire.execute.reference import ReferenceExecutor

    return ReferenceExecutor


def open_pack_cache(settings: ExecutorConfig) -> PackCache | None:
    """Return the cache of packed weights, if one is configured."""
    if settings.pack_cache is None:
        return None
    return PackCache(user_path(settings.pack_cache), Log("engine"))


def _torch_class(config: EngineConfig) -> ExecutorClass:
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
        from quire.execute.gpu.offload_plan import OffloadSize

        offload = OffloadSize(
            saved_bytes=settings.cpu_offload_bytes, kv_bytes=config.cache.kv_cache_memory_bytes
        )
    exact = settings.numerics != "fast"
    return TorchExecutorClass(
        device,
        exact=exact,
        has_fp8=has_fp8(device, machine),
        captures=not settings.enforce_eager,
        offload=offload,
    )
