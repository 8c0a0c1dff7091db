"""LayerStream: matrices of some layers in pinned memory, copied to the device two layers ahead.

The device has SLOTS places for layers. Layer n of those offloaded always lies in place n mod SLOTS,
so that products are bound to fixed addresses. A copy into a place waits for the products that read
what was there; a product waits for the copy of its layer; nothing else waits, and the host never
does. Knows no operation. Always holds: a layer's bytes are those that were loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.execute.gpu.load import Loaded
from quire.execute.gpu.offload_plan import SLOTS, OffloadPlan
from quire.execute.gpu.stream import Mark, Stream

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The part of a weight that is copied, in host memory and on the device."""

    host: Tensor
    device: Tensor


class LayerStream:
    """weights: with the places of offloaded matrices in the place of the matrices."""

    def __init__(
        self, plan: OffloadPlan, loaded: Loaded, device: torch.device, stream: Stream
    ) -> None:
        self._stream, self._copies = stream, stream.beside()
        hosts = [{name: _moving(_of(loaded, name)) for name in layer} for layer in plan.layers]
        self._slots = [
            torch.empty(
                max((_room(one) for one in hosts[slot::SLOTS]), default=0),
                dtype=torch.uint8,
                device=device,
            )
            for slot in range(SLOTS)
        ]
        plain, few = dict(loaded.plain), dict(loaded.few)
        self._layers: list[list[_Matrix]] = []
        self._layer_of: dict[str, int] = {}
        for number, layer in enumerate(hosts):
            places = _laid_out(self._slots[number % SLOTS], layer)
            self._layers.append([_Matrix(layer[name], places[name]) for name in layer])
            for name, place in places.items():
                self._layer_of[name] = number
                target = few if name in few else plain
                target[name] = _with_moving(_of(loaded, name), place)
        self.weights = replace(loaded, plain=plain, few=few)
        # What was copied so far; the bytes of one step are those of all layers.
        self.copied_bytes = 0
        self._arrived: list[Mark] = []
        for number in range(min(SLOTS, len(self._layers))):
            self._copy(number)
            self._arrived.append(self._copies.mark())

    def layer_of(self, weight: str | None) -> int | None:
        """Return the number of the offloaded layer a weight belongs to."""
        return None if weight is None else self._layer_of.get(weight)

    def run(self, parts: Sequence[tuple[int | None, Callable[[], None]]]) -> None:
        """Queue the parts of a step, each with the offloaded layer it reads, if any."""
        for layer, launch in parts:
            if layer is None:
                self._stream.do(launch)
                continue
            self._stream.behind(self._arrived[layer % SLOTS])
            self._stream.do(launch)
            self._refill(layer)

    def _refill(self, layer: int) -> None:
        """Let the next layer of a place follow; the first ones, after the last, for the next
        step."""
        following = layer + SLOTS if layer + SLOTS < len(self._layers) else layer % SLOTS
        if following == layer:
            return
        self._copies.behind(self._stream.mark())
        self._copy(following)
        self._arrived[layer % SLOTS] = self._copies.mark()

    def _copy(self, layer: int) -> None:
        for matrix in self._layers[layer]:
            self._copies.copy(matrix.host, matrix.device)
            self.copied_bytes += matrix.host.nbytes


def to_host(weight: Any, stream: Stream) -> Any:
    """Return a loaded weight with its matrix in pinned memory instead of on the device."""
    moving = _moving(weight)
    host = stream.host_memory(moving.nbytes).view(moving.dtype).reshape(moving.shape)
    host.copy_(moving)
    return _with_moving(weight, host)


def parts_of(
    weights: Sequence[str | None], layer_of: Callable[[str | None], int | None]
) -> list[tuple[int | None, int, int]]:
    """Return runs of calls [first, end) with the offloaded layer that they read. weights: the
    product's, of each call, or None. A layer's run is from its first product to its last."""
    layers = [layer_of(weight) for weight in weights]
    parts: list[tuple[int | None, int, int]] = []
    at = 0
    while at < len(layers):
        layer, end = layers[at], at + 1
        if layer is not None:
            end = len(layers) - layers[::-1].index(layer)
        else:
            while end < len(layers) and layers[end] is None:
                end += 1
        parts.append((layer, at, end))
        at = end
    return parts


def _of(loaded: Loaded, name: str) -> Any:
    return loaded.few[name] if name in loaded.few else loaded.plain[name]


def _field(weight: Any) -> str:
    return "packed" if hasattr(weight, "packed") else "values"


def _moving(weight: Any) -> Tensor:
    """Return the tensor of a weight that is copied."""
    moving: Tensor = weight if isinstance(weight, Tensor) else getattr(weight, _field(weight))
    assert moving.is_contiguous(), "as it was loaded"
    return moving


def _with_moving(weight: Any, moving: Tensor) -> Any:
    return moving if isinstance(weight, Tensor) else replace(weight, **{_field(weight): moving})


def _room(layer: Mapping[str, Tensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in layer.values())


def _laid_out(slot: Tensor, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the place of each tensor in a slot."""
    places, first = {}, 0
    for name, tensor in layer.items():
        raw = slot[first : first + tensor.nbytes]
        places[name] = raw.view(tensor.dtype).reshape(tensor.shape)
        first += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places
