"""Loads of experts: counted by the executor, reported with the engine's counters, read from a file.

Knows no placement. Always holds: what is reported counts from the end of the start, and costs
nothing for a model without experts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from quire.base.engine_stats import EXPERT_TOKENS, EngineStats
from quire.base.errors import SettingError
from quire.base.regular_file import read_regular
from quire.base.user_path import user_path
from quire.execute.executor import Executor

EVERY_MS = 1_000.0
MAX_FILE_BYTES = 64 << 20
_LINE = re.compile(EXPERT_TOKENS + r"_total\{(.*)\} ([0-9]{1,18}(?:\.[0-9]*)?(?:e\+?[0-9]{1,2})?)")
_LABEL = re.compile(r'(layer|expert)="([0-9]{1,6})"')

Loads = tuple[tuple[int, ...], ...]


@runtime_checkable
class CountingExecutor(Protocol):
    """An Executor that counts how often rows choose each expert, by mixture."""

    @property
    def expert_loads(self) -> list[list[int]]:
        """Rows by mixture and expert, since the executor was made."""


class ExpertLoads:
    """Returns loads for the engine's counters: once a second, and when nothing runs; else ()."""

    def __init__(self, executor: CountingExecutor) -> None:
        self._executor = executor
        self._at_first = executor.expert_loads  # of steps that warmed the engine up
        self._next_ms = 0.0

    def __call__(self, stats: EngineStats) -> Loads:
        if stats.running and stats.last_step_ms < self._next_ms:
            return ()
        self._next_ms = stats.last_step_ms + EVERY_MS
        return tuple(
            tuple(count - before for count, before in zip(counts, befores, strict=True))
            for counts, befores in zip(self._executor.expert_loads, self._at_first, strict=True)
        )


def expert_loads_of(executor: Executor) -> ExpertLoads | None:
    """Return what reports the loads; None without experts, or where they are not counted."""
    if isinstance(executor, CountingExecutor) and executor.expert_loads:
        return ExpertLoads(executor)
    return None


def read_expert_loads(file: str) -> Loads:
    """Read loads from a copy of a server's metrics, by layer and expert. Raises SettingError."""
    path = user_path(file)
    try:
        text = read_regular(path, limit_bytes=MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise SettingError(f"expert_load_file: {path} cannot be read: {error}") from error
    found: dict[int, dict[int, int]] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            continue
        labels = dict(_LABEL.findall(match[1]))
        if len(labels) == 2:
            of_layer = found.setdefault(int(labels["layer"]), {})
            expert = int(labels["expert"])
            of_layer[expert] = of_layer.get(expert, 0) + int(float(match[2]))
    return tuple(_in_order(path, found[layer], layer) for layer in _all_of(path, found))


def _all_of(path: Path, found: dict[int, dict[int, int]]) -> range:
    if not found or sorted(found) != list(range(len(found))):
        raise SettingError(
            f"expert_load_file: {path} has no {EXPERT_TOKENS}_total for the layers of a model from "
            "0 on; give a copy of the /metrics of a server of this model, after some requests"
        )
    return range(len(found))


def _in_order(path: Path, of_layer: dict[int, int], layer: int) -> tuple[int, ...]:
    if sorted(of_layer) != list(range(len(of_layer))):
        raise SettingError(
            f"expert_load_file: {path} has no {EXPERT_TOKENS}_total for some experts of layer "
            f"{layer}; give a whole copy of a server's /metrics"
        )
    return tuple(of_layer[expert] for expert in range(len(of_layer)))
