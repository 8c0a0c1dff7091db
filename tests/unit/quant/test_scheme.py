"""Names of precisions, their sizes, and rules that mix them."""

from __future__ import annotations

import pytest

from quire.quant.scheme import SCHEMES, canonical, parse_rule, scheme_names


def test_every_name_has_one_meaning() -> None:
    assert canonical("none") == canonical("") == ""
    assert canonical("int4") == canonical("int4-g32") == "int4-g32"
    assert {canonical(name) for name in scheme_names()} == {"", *SCHEMES} - {"fp8-static"}


@pytest.mark.parametrize("name", ["fp8-static", "int3", "INT8", "int4-g16", "q4_0", "bf16"])
def test_an_unknown_precision_is_rejected_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is not a precision; allowed: none, int8, "):
        canonical(name)


@pytest.mark.parametrize(
    ("name", "columns", "num_bytes"),
    [
        ("int8", 100, 100 + 4),
        ("int4-g32", 128, 64 + 4 * 2),
        ("int4-g32", 100, 50 + 4 * 2),
        ("int4-g32-zp", 128, 64 + 4 * 3),
        ("int4-g64", 65, 33 + 2 * 2),
        ("int4-g128", 1024, 512 + 8 * 2),
        ("fp8", 100, 100 + 4),
        ("fp8-block", 4096, 4096 + 1),
    ],
)
def test_the_size_of_a_row_includes_its_scales(name: str, columns: int, num_bytes: int) -> None:
    assert SCHEMES[name].row_bytes(columns) == num_bytes


def test_a_rule_is_a_pattern_and_a_precision() -> None:
    rule = parse_rule("layers.*.down=int8")
    assert rule.precision == "int8"
    assert rule.matches("layers.12.down")
    assert not rule.matches("layers.12.gate_up")


@pytest.mark.parametrize("text", ["", "int8", "=int8", "head=", "="])
def test_an_invalid_rule_is_rejected_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rule; write a weight's name"):
        parse_rule(text)
