"""docs/serving.md keeps up with the code: fields, metrics, open paths and flags it names exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire.api.auth import OPEN_PATHS
from quire.api.fields import (
    APPLY_TEMPLATE,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
)
from quire.api.foreign_fields import documented
from quire.api.paths import FOREIGN_PATHS
from quire.cli.serve import add_arguments
from quire.config.foreign_flags import INSTEAD, SUBCOMMANDS
from quire.obs.metrics import Metrics

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "serving.md").read_text()
COMPATIBILITY = (DOCS / "compatibility.md").read_text()


def test_every_field_that_is_honoured_is_on_the_page() -> None:
    texts = TOKENIZE | DETOKENIZE | APPLY_TEMPLATE
    fields = CHAT | COMPLETIONS | texts
    missing = [name for name in fields if f"`{name}`" not in PAGE + COMPATIBILITY]
    assert missing == []


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


def test_every_metric_is_on_the_page_and_no_other() -> None:
    families = text_string_to_metric_families(Metrics().text().decode())
    shown = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if not family.name.endswith("_created")
    }
    assert set(re.findall(r"`(quire_\w+)", PAGE)) == shown


def test_every_open_path_is_on_the_page() -> None:
    assert all(f"`{path}`" in PAGE for path in OPEN_PATHS)


def test_every_flag_the_page_names_exists() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"`(--[\w-]+)", PAGE))
    assert named <= known
