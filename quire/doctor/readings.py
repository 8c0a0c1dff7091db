"""Readings of a server's metrics, and the Window between two of them.

A reading is /metrics parsed; a window has the differences of counters and histogram buckets, so it
describes the traffic between the readings and nothing before. docs/metrics.md lists the names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.base.errors import WorkerError

Labels = tuple[tuple[str, str], ...]
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)(?: -?\d+)?")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of one /metrics. at_s: when it was read, on any clock."""

    at_s: float
    samples: Mapping[str, Mapping[Labels, float]]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over its labels, of those that match; 0 without samples."""
        wanted = set(labels.items())
        found = self.samples.get(name, {})
        return sum(value for key, value in found.items() if wanted.issubset(key))


def read_metrics(text: str, *, at_s: float, where: str) -> Reading:
    """Parse Prometheus' text format. Raises WorkerError where it is something else."""
    samples: dict[str, dict[Labels, float]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line.strip())
        value = None if found is None else _number(found[3])
        if found is None or value is None:
            raise WorkerError(
                f"{where}: line {number} is not a metric: {line[:_MAX_SHOWN]!r}; give the address "
                "of a Quire server"
            )
        labels = tuple(sorted((one[1], one[2]) for one in _LABEL.finditer(found[2] or "")))
        samples.setdefault(found[1], {})[labels] = value
    if not any(name.startswith("quire_") for name in samples):
        raise WorkerError(f"{where} has no metrics of Quire; give the address of a Quire server")
    return Reading(at_s, samples)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Histogram:
    """The observations of a window. bounds: upper bounds of buckets, the last infinite.

    counts: of each bucket alone. total: the sum of the observed values.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def num(self) -> float:
        """Return the number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Return the mean of the observations, 0 without any."""
        return self.total / self.num if self.num else 0.0

    def quantile(self, share: float) -> float:
        """Return the value that `share` of the observations do not exceed; NaN without any.

        Linear within a bucket. In the last one it is the largest finite bound.
        """
        rank, seen, low = share * self.num, 0.0, 0.0
        if not self.num:
            return math.nan
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and seen + count >= rank:
                return low if math.isinf(bound) else low + (bound - low) * (rank - seen) / count
            seen += count
            low = bound if not math.isinf(bound) else low
        return low


class Window:
    """The traffic between two readings. Raises WorkerError where the server restarted between."""

    def __init__(self, first: Reading, last: Reading) -> None:
        self.first, self.last = first, last
        self.seconds = last.at_s - first.at_s
        if not self.seconds > 0:
            raise WorkerError("the two readings are of the same moment; raise --seconds")
        if last.value("quire_steps_total") < first.value("quire_steps_total"):
            raise WorkerError("the server restarted between the two readings; try again")

    def count(self, name: str, **labels: str) -> float:
        """Return by how much a counter grew."""
        return max(self.last.value(name, **labels) - self.first.value(name, **labels), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return by how much a counter grew for each value of a label; values that did."""
        values = {dict(key).get(label, "") for key in self.last.samples.get(name, {})}
        grown = {value: self.count(name, **{label: value}) for value in sorted(values)}
        return {value: count for value, count in grown.items() if count}

    def least(self, name: str) -> float:
        """Return the lower of a gauge's two values: what was there at both readings."""
        return min(self.first.value(name), self.last.value(name))

    def most(self, name: str) -> float:
        """Return the higher of a gauge's two values."""
        return max(self.first.value(name), self.last.value(name))

    def histogram(self, name: str) -> Histogram:
        """Return the observations of a histogram in the window."""
        bounds = self._bounds(name)
        below = [self.count(f"{name}_bucket", le=text) for _, text in bounds]  # cumulative
        counts = [max(n - before, 0.0) for before, n in pairwise((0.0, *below))]
        return Histogram(
            tuple(bound for bound, _ in bounds), tuple(counts), self.count(f"{name}_sum")
        )

    def _bounds(self, name: str) -> Sequence[tuple[float, str]]:
        texts = {dict(key).get("le", "") for key in self.last.samples.get(f"{name}_bucket", {})}
        numbers = [(number, text) for text in texts if (number := _number(text)) is not None]
        return sorted(numbers)
