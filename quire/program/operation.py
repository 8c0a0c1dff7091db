"""Operation: what all operations of a program have in common, and the types of their fields.

Knows no single operation. Always holds: an operation owns its contract, cost, printing and
encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from quire.program.cost import Cost, StepShape
from quire.program.declarations import Declarations
from quire.program.tensors import View

_WEIGHT = "weight"
WeightName = Annotated[str, _WEIGHT]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldType:
    """The type of an operation's field: "view", "weight", "int", "ints", "float", or the names
    of a choice joined by "|"; `choice` is its enumeration."""

    name: str
    is_optional: bool = False
    choice: type[StrEnum] | None = None

    def __str__(self) -> str:
        return self.name + ("?" if self.is_optional else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on named buffers.

    reads, writes: names of the view fields, in order. A view in both is updated in place.
    """

    kind: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]
    writes: ClassVar[tuple[str, ...]]
    # Whether executors may run a few rows at a time, and fuse the operation with its neighbours.
    # False where all rows are computed in one call, such as a product that packs them together.
    is_row_wise: ClassVar[bool] = True

    @property
    def inputs(self) -> tuple[View, ...]:
        """The views it reads."""
        views = _values(self.reads)(self)
        return tuple([view for view in views if view is not None])

    @property
    def outputs(self) -> tuple[View, ...]:
        """The views it writes."""
        return _values(self.writes)(self)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights it uses."""
        given: Any = type(self)
        return tuple([name for name in _values(_weight_fields(given))(self) if name is not None])

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields that are no views, by name."""
        return {
            name: getattr(self, name)
            for name, kind in schema(type(self)).items()
            if kind.name != "view"
        }

    @property
    def exchanges(self) -> int:
        """How often ranks wait for each other in it."""
        return 0

    def with_views(self, change: Callable[[View], View]) -> Self:
        """Return the operation with each of its views replaced by `change(view)`."""
        views = {name: getattr(self, name) for name in dict.fromkeys((*self.reads, *self.writes))}
        changed = {name: change(view) for name, view in views.items() if view is not None}
        return replace(self, **changed)

    def check(self, declared: Declarations) -> None:
        """Raise ValueError where the fields contradict each other or what is declared."""

    def cost(self, declared: Declarations, step: StepShape) -> Cost:
        """Return what the operation costs in a step, buffers included."""
        buffer_bytes = sum(
            step.rows(view.buffer.rows) * view.width * view.dtype.itemsize
            for view in (*self.inputs, *self.outputs)
        )
        return self._cost(declared, step) + Cost(buffer_bytes=buffer_bytes)

    def detail(self, declared: Declarations) -> str:
        """Return the text `quire program` prints beside the views: weights, layer, geometry."""
        return ""

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        """Cost without the bytes of buffers."""
        return Cost()


def schema(operation: type[Operation]) -> Mapping[str, FieldType]:
    """Return the fields of an operation class and their types, in order."""
    given: Any = operation  # type checkers doubt that classes are hashable
    return _schema(given)


@cache
def _values(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads these fields of an operation: programs have thousands of operations."""
    if len(names) == 1:
        read = attrgetter(names[0])
        return lambda operation: (read(operation),)
    return attrgetter(*names) if names else lambda operation: ()


@cache
def _weight_fields(operation: Any) -> tuple[str, ...]:
    return tuple(name for name, kind in _schema(operation).items() if kind.name == _WEIGHT)


@cache
def _schema(operation: Any) -> Mapping[str, FieldType]:
    hints = get_type_hints(operation, include_extras=True)
    return MappingProxyType(
        {field.name: _field_type(hints[field.name]) for field in fields(operation)}
    )


def _field_type(hint: Any) -> FieldType:
    is_optional = isinstance(hint, UnionType) or type(None) in get_args(hint)
    if is_optional:
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Annotated:
        return FieldType(name=hint.__metadata__[0], is_optional=is_optional)
    if hint is View:
        return FieldType(name="view", is_optional=is_optional)
    if hint == tuple[int, ...]:
        return FieldType(name="ints", is_optional=is_optional)
    if issubclass(hint, StrEnum):
        names = "|".join(choice.value for choice in hint)
        return FieldType(name=names, is_optional=is_optional, choice=hint)
    if hint in (int, float):
        return FieldType(name=hint.__name__, is_optional=is_optional)
    raise TypeError(f"an operation's field cannot be of type {hint}")


def check_width(name: str, view: View, width: int) -> None:
    """Raise ValueError unless `view`, the field `name`, has `width` columns."""
    if view.width != width:
        raise ValueError(f"{name} is {view}, {view.width} columns wide; {width} are meant")
