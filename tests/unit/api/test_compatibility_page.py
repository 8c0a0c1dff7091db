"""docs/compatibility.md: its tables of foreign fields, paths and flags are those of the code."""

from __future__ import annotations

from pathlib import Path

from quire.api.foreign_fields import documented
from quire.api.paths import FOREIGN_PATHS
from quire.config.foreign_flags import INSTEAD, SUBCOMMANDS

COMPATIBILITY = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text()


def test_the_tables_of_the_compatibility_page_are_those_of_the_code() -> None:
    tables = {
        "fields": [*documented()],
        "paths": [(f"`{path}`", text) for path, text in FOREIGN_PATHS.items()],
        "flags": [(f"`{flag}`", text) for flag, text in INSTEAD.items()],
        "subcommands": [(f"`{name}`", text) for name, text in SUBCOMMANDS.items()],
    }
    for name, rows in tables.items():
        _, _, rest = COMPATIBILITY.partition(f"<!-- {name} -->\n")
        written, _, _ = rest.partition("<!-- end -->")
        lines = [f"| {left} | {right} |" for left, right in rows]
        assert written.splitlines()[2:] == lines, f"write the table of {name} anew"
