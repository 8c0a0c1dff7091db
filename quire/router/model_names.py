"""ModelNames: which model of the replicas answers for a name that clients send.

A name may be an alias of several weighted models; without an alias it is the replicas' own name. A
session stays with one model, by weighted rendezvous hashing; other requests are divided exactly by
the weights. Knows which models are served by a function that is handed in. Always holds: a target
that no available replica serves gets nothing while another can answer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.router.route_file import ModelTable, Target


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """model: as replicas name it. longer: for prompts beyond its context; "" for none."""

    model: str
    longer: str = ""


class ModelNames:
    """tables: by the name that clients send. default: for requests without a name."""

    def __init__(self, tables: Mapping[str, str | ModelTable], default: str = "") -> None:
        self._aliases = {
            name: _Alias(_targets(name, table), "" if isinstance(table, str) else table.longer)
            for name, table in tables.items()
        }
        self.default = default

    @property
    def names(self) -> Sequence[str]:
        """The names that are aliases."""
        return tuple(self._aliases)

    def targets(self, name: str) -> Sequence[str]:
        """Return the models of an alias."""
        return [one.model for one in self._aliases[name].targets]

    def choose(
        self, name: str, session: str, is_available: Callable[[str], bool]
    ) -> ChosenModel | None:
        """Return the model for a name; None where the name is no alias."""
        alias = self._aliases.get(name)
        return None if alias is None else alias.choose(name, session, is_available)

    def entries(self, served: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the aliases as /v1/models lists them. served: the replicas' own models."""
        listed = []
        for name, alias in self._aliases.items():
            models = [one.model for one in alias.targets]
            found = [served[one] for one in models if one in served]
            if not found:
                continue
            lengths = [length for one in found if (length := _length(one))]
            longer = _length(served.get(alias.longer, {}))
            entry: dict[str, Any] = {
                "id": name,
                "object": "model",
                "created": found[0].get("created", 0),
                "owned_by": "quire",
                "targets": [{"model": one.model, "weight": one.weight} for one in alias.targets],
            }
            if lengths:
                entry["max_model_len"] = max(min(lengths), longer)
            listed.append(entry)
        return listed


def _length(entry: Mapping[str, Any]) -> int:
    found = entry.get("max_model_len")
    return found if isinstance(found, int) else 0


def _targets(name: str, table: str | ModelTable) -> list[Target]:
    if isinstance(table, str):
        return [Target(model=table)]
    return list(table.targets) or [Target(model=name)]


class _Alias:
    """Targets, and how far each is behind its share."""

    def __init__(self, targets: Sequence[Target], longer: str) -> None:
        self.targets = [one for one in targets if one.weight > 0]
        self.longer = longer
        self._due = dict.fromkeys((one.model for one in self.targets), 0.0)

    def choose(self, name: str, session: str, is_available: Callable[[str], bool]) -> ChosenModel:
        able = [one for one in self.targets if is_available(one.model)] or self.targets
        if len(able) == 1:
            chosen = able[0]
        elif session:
            chosen = max(
                able, key=lambda one: _score(f"{name}\0{session}\0{one.model}", one.weight)
            )
        else:
            chosen = self._next(able)
        return ChosenModel(chosen.model, self.longer)

    def _next(self, able: Sequence[Target]) -> Target:
        """Return the target that is furthest behind its share (smooth weighted round robin)."""
        for one in able:
            self._due[one.model] += one.weight
        chosen = max(able, key=lambda one: self._due[one.model])
        self._due[chosen.model] -= sum(one.weight for one in able)
        return chosen


def _score(text: str, weight: float) -> float:
    """Return the score of a target: the highest wins as often as its weight says."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    drawn = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -weight / math.log(drawn)
