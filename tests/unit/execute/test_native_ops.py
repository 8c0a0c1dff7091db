"""Python and C++ describe the same operations, and differences are detected."""

from __future__ import annotations

import pytest

from quire import _native
from quire.execute.native_ops import check_table, operation_table


def test_the_compiled_module_has_the_fields_of_every_operation() -> None:
    native = {kind: dict(fields) for kind, fields in _native.OPERATIONS.items()}
    assert operation_table() == native
    assert native["norm"]["bias"] == "weight?"
    assert native["activation"]["form"] == "silu|gelu|gelu_tanh|relu"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("scale", {"x": "view"}, r"scale: {'x': 'view', 'factor': 'float'} in Python, {'x'"),
        ("scale", {"x": "view", "factor": "int"}, r"scale: .*'factor': 'int'} in C\+\+"),
        ("scale", None, r"scale: .* in Python, missing in C\+\+"),
        ("unknown_op", {"x": "view"}, "unknown_op: missing in Python"),
    ],
)
def test_a_difference_is_an_error_that_names_both_sides(
    kind: str, fields: dict[str, str] | None, message: str
) -> None:
    native = {name: dict(known) for name, known in operation_table().items()}
    if fields is None:
        del native[kind]
    else:
        native[kind] = fields
    with pytest.raises(ImportError, match=message):
        check_table(native)
