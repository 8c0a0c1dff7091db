"""The configurations of the engines of --data-parallel-size: divided threads, a GPU for each, or
as many as an engine has ranks.

Reads the settings only; memory is divided where it is planned (engine/assembly/sized_model.py).
Always holds: the engines differ in what computes, never in what decides an answer.
"""

from __future__ import annotations

from dataclasses import replace

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.config.machine import num_compute_threads


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return the configuration of each engine. Raises SettingError for fewer threads than engines,
    or than ranks of all engines.

    The memory is divided where it is planned (engine/assembly/sized_model.py).
    """
    executor = config.executor
    num_engines, num_ranks = executor.data_parallel_size, executor.num_ranks
    if num_engines == 1:
        return [config]
    if executor.executor == "torch" and executor.device != "cpu":
        if executor.device != "cuda":
            raise SettingError(
                f"data_parallel_size is {num_engines} and device is {executor.device or 'auto'}: "
                "give --device cuda, for one GPU to each engine or rank, or --device cpu"
            )
        return [
            replace(config, executor=replace(executor, device=f"cuda:{number * num_ranks}"))
            for number in range(num_engines)
        ]
    threads = num_compute_threads(executor.num_threads)
    if threads < num_engines * num_ranks:
        ranks = f" and {executor.ranks_text}" if num_ranks > 1 else ""
        raise SettingError(
            f"data_parallel_size is {num_engines}{ranks} and there are {threads} compute threads "
            "(one per CPU core, unless num_threads is given), which are divided over the engines"
            f"{' and their ranks' * bool(ranks)}: lower it"
        )
    shares = [
        threads // num_engines + (number < threads % num_engines) for number in range(num_engines)
    ]
    return [replace(config, executor=replace(executor, num_threads=share)) for share in shares]
