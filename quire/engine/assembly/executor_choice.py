"""Choose the executor of a config, and load only its modules.

A part of the wiring, like assemble.py. Knows the settings and which executors there are, and no
model. Always holds: one executor is imported, since each takes a noticeable part of a start.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.user_path import user_path
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.engine.assembly.sizing import buffer_bytes
from quire.execute.executor import ExecutorClass
from quire.weights.pack_cache import PackCache

if TYPE_CHECKING:
    from quire.execute.gpu.offload_plan import OffloadSize


def choose_executor_class(config: EngineConfig) -> ExecutorClass:
    """Return the executor class. Raises SettingError where its libraries are not installed."""
    settings = config.executor
    if settings.num_ranks > 1:
        from quire.engine.assembly.ranks import ranked_class

        shares_blocks = config.transfer.is_on or config.kv_store.is_on
        return ranked_class(settings, config.cache.block_size, shares_blocks=shares_blocks)
    if settings.disk_offload_gb is not None:
        from quire.execute.streamed_weights import StreamingExecutorClass

        return StreamingExecutorClass(
            offload_bytes=settings.disk_offload_bytes,
            kv_bytes=config.cache.kv_cache_memory_bytes,
            buffers=partial(_bytes_beside, config),
        )
    if settings.executor == "native":
        from quire.execute.native import NativeExecutor

        return NativeExecutor
    if settings.executor == "torch":
        return _torch_class(config)
    from quire.execute.reference import ReferenceExecutor

    return ReferenceExecutor


def _bytes_beside(config: EngineConfig, token_bytes: int) -> int:
    """Return the memory that an engine on a CPU takes beside weights, step buffers and KV cache."""
    num_bytes = buffer_bytes(config, token_bytes, device_is_own=False)
    if num_tokens := config.speculation.speculate_history_tokens:
        from quire.speculative.history import history_bytes  # only where one is kept

        num_bytes += history_bytes(num_tokens)
    return num_bytes


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
        offload = offload_size(config, is_gpu=device.type != "cpu")
    exact = settings.numerics != "fast"
    return TorchExecutorClass(
        device,
        exact=exact,
        has_fp8=has_fp8(device, machine),
        captures=not settings.enforce_eager,
        offload=offload,
    )


def offload_size(config: EngineConfig, *, is_gpu: bool) -> OffloadSize:
    """Return how much of a GPU's memory is to be saved. Raises SettingError where there is no GPU:
    its memory would be counted as saved and taken all the same."""
    from quire.execute.gpu.offload_plan import OffloadSize  # only where weights are in host memory

    settings, cache = config.executor, config.cache
    if not is_gpu:
        raise SettingError(
            f"cpu_offload_gb is {settings.cpu_offload_gb} and there is no GPU here, so that no "
            "memory can be saved: leave it out, or take --executor native and --disk-offload-gb "
            "for a model larger than memory"
        )
    return OffloadSize(
        saved_bytes=settings.cpu_offload_bytes,
        kv_bytes=cache.kv_cache_memory_bytes,
        buffers=partial(buffer_bytes, config, device_is_own=True),
        host_bytes=cache.kv_tier_host_bytes or 0,
        num_engines=settings.data_parallel_size,
    )
