"""Choose the executor of a config, and load only its modules.

A part of the wiring, like assemble.py. Knows the settings and which executors there are, and no
model. Always holds: one executor is imported, since each takes a noticeable part of a start.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from quire.base.log import Log
from quire.base.user_path import user_path
from quire.config.executor_config import ExecutorConfig
from quire.config.groups import EngineConfig
from quire.execute.executor import ExecutorClass
from quire.weights.pack_cache import PackCache

if TYPE_CHECKING:
    from quire.execute.gpu.executor_class import TorchExecutorClass
    from quire.ranks.executor_class import RankedExecutorClass


def import_executor(settings: ExecutorConfig) -> None:
    """Import the modules of the executor, before there is a model.

    Whatever fails, as with too little memory, the start imports them again and reports it. PyTorch
    is imported by the start alone: it may load in part, and fail in another way a second time.
    """
    if settings.executor == "torch":
        return
    with suppress(Exception):
        import_module(f"quire.execute.{settings.executor}")


def choose_executor_class(config: EngineConfig, undo: ExitStack | None = None) -> ExecutorClass:
    """Return the executor class. undo: see ranked_class. Raises SettingError where its
    libraries are not installed, CapacityError where a cluster has no room for its ranks."""
    settings = config.executor
    if settings.num_ranks > 1:
        from quire.engine.assembly.ranks import engine_ranks

        return engine_ranks(config, undo)
    if settings.disk_offload_gb is not None:
        from quire.engine.assembly.offload import stream_size
        from quire.execute.streamed_weights import StreamingExecutorClass

        return StreamingExecutorClass(stream_size(config))
    if settings.executor == "native":
        from quire.execute.native import NativeExecutor

        return NativeExecutor
    if settings.executor == "torch":
        from quire.engine.assembly.torch_choice import torch_class

        return torch_class(config)
    from quire.execute.reference import ReferenceExecutor

    return ReferenceExecutor


def class_beside(config: EngineConfig, executor_class: ExecutorClass) -> ExecutorClass:
    """Return the class of executors of other models in the process of the model's executor:
    beside several ranks they are not divided, and rank 0 has them; all their weights are where they
    are computed."""
    if config.executor.disk_offload_gb is not None:
        from quire.execute.native import NativeExecutor

        return NativeExecutor
    if config.executor.num_ranks == 1:
        if config.executor.cpu_offload_gb is None:
            return executor_class
        return replace(cast("TorchExecutorClass", executor_class), offload=None)
    return cast("RankedExecutorClass", executor_class).kind.class_beside()


def open_pack_cache(settings: ExecutorConfig) -> PackCache | None:
    """Return the cache of packed weights, if one is configured."""
    if settings.pack_cache is None:
        return None
    return PackCache(user_path(settings.pack_cache), Log("engine"))
