"""The engines of --data-parallel-size: a configuration for each, and their start.

Threads, processors and GPUs are divided; files and ports get the engine's number. Reads the
settings and the machine's cores; memory is divided where it is planned
(engine/assembly/sized_model.py). Always holds: the engines differ in what computes and where they
write, never in what decides an answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from quire.base.engine_endpoints import (
    LAST_PORT,
    colliding_ports,
    endpoint_of_engine,
    port_of,
)
from quire.base.errors import SettingError
from quire.base.log_process import LogSettings
from quire.config.groups import CacheConfig, EngineConfig
from quire.config.kv_events import read_kv_events
from quire.config.machine import num_compute_threads, num_usable_cores
from quire.engine.client.bound_launch import launch_bound
from quire.engine.client.launch import EngineProcess
from quire.ranks.placement import cpus_of_ranks


def launch_engines(
    config: EngineConfig, logging: LogSettings | None
) -> list[tuple[EngineConfig, EngineProcess]]:
    """Start all engines; does not wait for them. Raises SettingError; no engine runs then.

    Engines of several ranks run on processors of their own, which the ranks then divide.
    """
    configs = engine_configs(config)
    cpus: Sequence[Sequence[int]] = [()] * len(configs)
    if config.executor.num_ranks > 1 and len(configs) > 1:
        cpus = cpus_of_ranks(len(configs))
    launched: list[tuple[EngineConfig, EngineProcess]] = []
    try:
        for own, share in zip(configs, cpus, strict=True):
            launched.append((own, launch_bound(own, logging, share)))
    except BaseException:
        end_engines(launched)
        raise
    return launched


def end_engines(engines: Sequence[tuple[EngineConfig, EngineProcess]]) -> None:
    """End engines that have no client yet, at once."""
    for _, process in engines:
        process.end(0.0)


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return the configuration of each engine. Raises SettingError for fewer threads, or cores,
    than the engines need."""
    executor = config.executor
    num_engines = executor.data_parallel_size
    if num_engines == 1:
        return [config]
    _check_cores(config)
    if config.cache.kv_events_config is not None:
        _check_events(config.cache.kv_events_config, num_engines)
    if executor.executor == "torch" and executor.device != "cpu":
        if executor.device != "cuda":
            raise SettingError(
                f"data_parallel_size is {num_engines} and device is {executor.device or 'auto'}: "
                "give --device cuda, for GPUs of its own to each engine, or --device cpu"
            )
        each = executor.num_ranks
        own = [replace(executor, device=f"cuda:{at * each}") for at in range(num_engines)]
    elif executor.distributed_executor_backend == "ray":  # threads are those of each rank
        own = [executor] * num_engines
    else:
        own = [replace(executor, num_threads=share) for share in _threads(config)]
    return [
        replace(
            config,
            executor=replace(
                one,
                record_plans=_numbered(one.record_plans, number),
                trace_file=_numbered(one.trace_file, number),
            ),
            cache=_own_cache(config.cache, number),
        )
        for number, one in enumerate(own)
    ]


def _threads(config: EngineConfig) -> list[int]:
    num_engines = config.executor.data_parallel_size
    threads = num_compute_threads(config.executor.num_threads)
    if threads < num_engines:
        raise SettingError(
            f"data_parallel_size is {num_engines} and there are {threads} compute threads (one per "
            "CPU core, unless num_threads is given), which are divided over the engines: lower it"
        )
    return [
        threads // num_engines + (number < threads % num_engines) for number in range(num_engines)
    ]


def _check_cores(config: EngineConfig) -> None:
    """Raise SettingError where ranks would share a core, or a thread."""
    executor = config.executor
    if executor.num_ranks == 1:
        return
    is_here = executor.distributed_executor_backend != "ray"  # others place all but rank 0
    needed = executor.data_parallel_size * (executor.num_ranks if is_here else 1)
    what = "ranks together" if is_here else "ranks 0 on this machine"
    given = (
        f"data_parallel_size is {executor.data_parallel_size} and {executor.ranks_text}, which are "
        f"{needed} {what}"
    )
    if needed > (cores := num_usable_cores()):
        raise SettingError(
            f"{given}, and this process may use {cores} CPU cores; at most one rank per core is "
            "allowed, since ranks wait for each other: lower one of them"
        )
    if is_here and executor.num_threads is not None and executor.num_threads < needed:
        raise SettingError(
            f"{given}, and num_threads is {executor.num_threads}, which are divided over them: "
            f"give at least {needed}, or leave it out"
        )


def _own_cache(cache: CacheConfig, number: int) -> CacheConfig:
    """Return the settings of a cache with the places of its own outside the pool."""
    if cache.kv_tier_path is not None:
        cache = replace(cache, kv_tier_path=str(PurePath(cache.kv_tier_path, f"engine-{number}")))
    if cache.kv_events_config is not None:
        cache = replace(cache, kv_events_config=_own_events(cache.kv_events_config, number))
    return cache


def _own_events(text: str, number: int) -> str:
    """Return the settings of an engine's KV events: the ports after the first engine's."""
    given, events = json.loads(text), read_kv_events(text)
    own = {"endpoint": _after("endpoint", events.endpoint, number)}
    if events.replay_endpoint is not None:
        own["replay_endpoint"] = _after("replay_endpoint", events.replay_endpoint, number)
    return json.dumps({**given, **own, "data_parallel_rank": number})


def _check_events(text: str, num_engines: int) -> None:
    """Raise SettingError where the rank is given, or ports of one engine would be another's."""
    events = read_kv_events(text)
    if events.data_parallel_rank:
        raise SettingError(
            f"kv_events_config has data_parallel_rank {events.data_parallel_rank}, and the engines "
            f"of data_parallel_size have the ranks 0 to {num_engines - 1}: leave it out"
        )
    if ports := colliding_ports(events.endpoint, events.replay_endpoint, num_engines):
        raise SettingError(
            f"kv_events_config has ports {ports[0]} and {ports[1]}, and each of {num_engines} "
            f"engines takes the next ones: put replay_endpoint at {ports[0] + num_engines} or later"
        )


def _after(name: str, endpoint: str, number: int) -> str:
    """Return the endpoint of engine `number`: TCP's next ports, or IPC's path with the number."""
    own = endpoint_of_engine(endpoint, number)
    port = port_of(own)
    if port is not None and port > LAST_PORT:
        raise SettingError(
            f"kv_events_config: {name} is {endpoint}, and engine {number} of data_parallel_size "
            f"would listen at port {port}: give a lower one"
        )
    return own


def _numbered(path: str | None, number: int) -> str | None:
    """Return the file of an engine, as in plans.engine-1.bin."""
    if path is None:
        return None
    own = PurePath(path)
    return str(own.with_name(f"{own.stem}.engine-{number}{own.suffix}")) if own.name else path
