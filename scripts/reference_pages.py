"""Write the generated parts of docs/: flags (of `quire route` too), routes, request fields, errors,
metrics, and the tables of docs/compatibility.md and docs/coming-from-*.md.

The flags come from argparse, fields, routes and errors from the OpenAPI document, metrics from the
registry; foreign_names.toml lists names of other servers. Each part stands between two marker
comments; the text around it is written by hand. `python scripts/reference_pages.py` rewrites the
parts, `--check` exits 1 where a page is not current.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.foreign_fields import documented
from quire.api.http.auth import is_open
from quire.api.http.origins import is_guarded
from quire.api.http.paths import FOREIGN_PATHS
from quire.api.openapi.document import document
from quire.api.openapi.error_words import error_rows
from quire.api.openapi.field_schemas import Known
from quire.api.openapi.field_words import GROUPS
from quire.api.openapi.operations import OPERATIONS
from quire.base.engine_stats import EngineStats
from quire.base.kv_store import KVStoreStats, StoreFailure
from quire.base.kv_transfer import Failure, TransferStats
from quire.cli.exit_codes import EXIT_CODES, SIGNALLED
from quire.cli.route import add_arguments as add_route_arguments
from quire.cli.serve import add_arguments
from quire.config.environment import FILE_VARIABLE
from quire.config.foreign_flags import FAMILIES, FOREIGN_SUBCOMMANDS, INSTEAD
from quire.config.sources import SETTINGS
from quire.obs import vllm_metrics as vllm_metrics_names
from quire.obs.metrics import Metrics
from quire.router.route_file import RouteFile

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Of each schema of a body, the first route that takes it.
BODIES: dict[str, str] = {}
for _name, _operation in OPERATIONS.items():
    if _operation.body is not None:
        _path = _name.partition(" ")[2]
        BODIES.setdefault(_operation.title, _path.removeprefix("/v1/").removeprefix("/"))
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="))
# A bound this large only says that the number fits its type.
_UNBOUNDED = 2**31 - 1
_MAX_CHOICES = 8


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def flags() -> str:
    """Return a table of flags for each group of `quire serve`."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    parts = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings]
        if actions:
            rows = [
                (_flag(action), *_key(action), _cell((action.help or "") % vars(action)))
                for action in actions
            ]
            head = ("Flag", "Key in the file", "Variable", "Meaning")
            title = "General" if group.title == "options" else group.title
            parts.append(f"### {title}\n\n" + table(head, rows))
    return "\n\n".join(parts)


def _flag(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.choices is not None:
        choices = [str(choice) for choice in action.choices]
        shown = [*choices[:_MAX_CHOICES], *(["..."] if len(choices) > _MAX_CHOICES else [])]
        return names + " " + " ".join(f"`{choice}`" for choice in shown)
    return names if action.nargs == 0 else f"{names} {action.metavar or ''}".strip()


def route_flags() -> str:
    """Return a table of the flags of `quire route`."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_route_arguments(parser)
    keys = {field.encode_name for field in msgspec.structs.fields(RouteFile)}
    rows = []
    for action in parser._actions:
        if action.option_strings:
            key = action.option_strings[-1].removeprefix("--")
            meaning = _cell((action.help or "") % vars(action))
            rows.append((_flag(action), f"`{key}`" if key in keys else "", meaning))
    return table(("Flag", "Key in the file", "Meaning"), rows)


def _key(action: argparse.Action) -> tuple[str, str]:
    """Return the key in a configuration file and the environment variable of a flag."""
    setting = SETTINGS.get(action.dest)
    if setting is not None:
        return f"`{setting.key}`", f"`{setting.variable}`"
    return "", f"`{FILE_VARIABLE}`" if action.dest == "config" else ""


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of all routes, of a server that names no model."""

    async def unused(request: Request) -> Response:
        raise NotImplementedError(request.url)

    keys = [key.split() for key in OPERATIONS]
    routes = [Route(path, unused, methods=[method]) for method, path in keys]
    return document(routes, Known(), lambda path: not is_open(path))


def routes() -> str:
    """Return a table of routes for each of the document's tags."""
    tagged: dict[str, list[tuple[str, str, str]]] = {}
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            access = "admin" if is_guarded(path) else "open" if is_open(path) else "key"
            row = (f"`{method.upper()} {path}`", access, _cell(operation["summary"]))
            tagged.setdefault(operation["tags"][0], []).append(row)
    return "\n\n".join(
        f"### {tag}\n\n" + table(("Route", "Access", "Answer"), rows)
        for tag, rows in tagged.items()
    )


def errors() -> str:
    """Return a table of the errors that the server can send."""
    rows = [
        (
            str(row.status),
            "none" if row.code is None else f"`{row.code}`",
            _cell(row.meaning),
            _cell(row.advice),
        )
        for row in error_rows()
    ]
    return table(("Status", "`code`", "Meaning", "What to do"), rows)


def exit_codes() -> str:
    """Return a table of the exit codes of the command."""
    rows = [(str(code), *map(_cell, words)) for code, words in EXIT_CODES.items()]
    rows.append(("128 + n", *map(_cell, SIGNALLED)))
    return table(("Exit code", "Meaning", "What to do"), rows)


def fields() -> str:
    """Return a table of request fields for each group, with their values and routes."""
    schemas = openapi()["components"]["schemas"]
    parts = []
    for group, names in GROUPS.items():
        rows = []
        for name in names:
            owners = [body for body in BODIES if _is_served(schemas[body], name)]
            found = {body: schemas[body]["properties"][name] for body in owners}
            where = ", ".join(BODIES[body] for body in owners)
            values = _by_route({body: _values(schema) for body, schema in found.items()})
            says = _by_route({body: _cell(one["description"]) for body, one in found.items()})
            rows.append((f"`{name}`", values, where, says))
        parts.append(f"### {group}\n\n" + table(("Field", "Values", "Routes", "Meaning"), rows))
    return "\n\n".join(parts)


def _by_route(said: Mapping[str, str]) -> str:
    """Return what is said of a field, for each route where that differs."""
    routes: dict[str, list[str]] = {}
    for body, text in said.items():
        routes.setdefault(text, []).append(BODIES[body])
    if len(routes) == 1:
        return next(iter(routes))
    return "<br>".join(f"{', '.join(names)}: {text}" for text, names in routes.items())


def other_fields() -> str:
    """Return the fields that are accepted without effect, or at their inert values only."""
    properties = openapi()["components"]["schemas"]["ChatRequest"]["properties"]
    rows = []
    for name, schema in properties.items():
        if schema.get("x-quire") == "no effect":
            rows.append((f"`{name}`", "any value of its type", "Cannot change the answer."))
        elif schema.get("x-quire") == "refused":
            allowed = _accepted(schema)
            rows.append((f"`{name}`", allowed, _cell(schema["description"])))
    return table(("Field", "Accepted values", "Why"), rows)


def _accepted(schema: Mapping[str, Any]) -> str:
    """Return the values of an enumeration, or those of each key of an object."""
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"])
    keys = schema["properties"].items()
    return "`null`, " + "; ".join(f"`{key}`: {_accepted(one)}" for key, one in keys)


def _is_served(schema: Mapping[str, Any], name: str) -> bool:
    return "x-quire" not in schema["properties"].get(name, {"x-quire": ""})


def _json(value: Any) -> str:
    words = {None: "null", True: "true", False: "false", "": '""'}
    is_word = value in (None, "") or isinstance(value, bool)
    return words[value] if is_word else str(value)


def _values(schema: Mapping[str, Any]) -> str:
    """Return the type and the bounds of a field, in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    if "anyOf" in schema:
        kinds = [_values(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kinds = schema.get("type", "any")
    kind = " or ".join(k for k in ([kinds] if isinstance(kinds, str) else kinds) if k != "null")
    bounds = [
        f"{sign} {schema[name]:,}"
        for name, sign in _BOUNDS
        if name in schema and abs(schema[name]) < _UNBOUNDED
    ]
    if kind == "array":
        kind = f"array of {_values(schema.get('items', {}))}"
        bounds = [f"at most {schema['maxItems']:,}"] if "maxItems" in schema else []
    if "maxLength" in schema:
        bounds = [f"at most {schema['maxLength']:,} characters"]
    default = [f"default {_json(schema['default'])}"] if "default" in schema else []
    return ", ".join([kind, *bounds, *default])


def metrics() -> str:
    """Return a table of the metrics a server shows."""
    rows, source = [], Metrics(("name",))
    counted = TransferStats(failures_total=tuple((one.value, 0) for one in Failure))
    stored = KVStoreStats(failures_total=tuple((one.value, 0) for one in StoreFailure))
    # A mixture and drafts, for their labels; what is shown only where blocks are exchanged or
    # shared.
    drafted = {"proposer": "ngram", "draft_tokens_total": (0,), "accepted_draft_tokens_total": (0,)}
    shown = EngineStats(expert_tokens_total=((0,),), transfer=counted, kv_store=stored, **drafted)
    source.see(shown)
    # A labelled metric that has counted nothing has no sample to read its labels from.
    collectors = source._shown._names_to_collectors
    for family in text_string_to_metric_families(source.text().decode()):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        keys = {key for sample in family.samples for key in sample.labels} - {"le"}
        labels = sorted(keys | set(getattr(collectors.get(family.name), "_labelnames", ())))
        shown = name + (f"{{{','.join(labels)}}}" if labels else "")
        rows.append((f"`{shown}`", family.type, _cell(family.documentation)))
    return table(("Name", "Type", "Meaning"), rows)


def vllm_metrics() -> str:
    """Return a table of vLLM's names of metrics and ours."""
    source = Metrics()
    source.show_vllm_names("box", 16)
    rows, ours = [], {theirs: name for name, theirs in vllm_metrics_names.NAMES.items()}
    sums = {
        **vllm_metrics_names.SUMS,
        vllm_metrics_names.ACCEPTED_AT: vllm_metrics_names.ACCEPTED,
    }
    for family in text_string_to_metric_families(source.text().decode()):
        if not family.name.startswith("vllm:"):
            continue
        shown = f"{family.name}_total" if family.type == "counter" else family.name
        own = ours.get(family.name, "")
        own = f"{own}_total" if family.type == "counter" else own
        text = f"`{own}`" if own else "`quire_kv_blocks_used` of `quire_kv_blocks`, 0 to 1"
        if family.name == vllm_metrics_names.CACHE:
            text = (
                "1, with the labels `block_size` (tokens) and `num_gpu_blocks` (`quire_kv_blocks`)"
            )
        if family.name in sums:
            by = ", by `position` from 0 on" * (family.name == vllm_metrics_names.ACCEPTED_AT)
            text = f"sum of `{sums[family.name]}_total`{by}"
        rows.append((f"`{shown}`", family.type, text))
    return table(("vLLM's name", "Type", "Here"), rows)


def foreign(use: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names of other servers and what this one does with them."""
    return table((use, "Here"), [(name, _cell(text)) for name, text in rows])


def _named(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(f"`{name}`", text) for name, text in texts.items()]


def foreign_names() -> dict[str, dict[str, Any]]:
    """Return the names of other servers by server."""
    path = Path(__file__).with_name("foreign_names.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def coming_flags(names: Mapping[str, Any]) -> str:
    """Return a table of another server's flags: those that have the same name here come first."""
    served = _served_flags()
    rows = []
    for synonyms, note in names.get("same", {}).items():
        unknown = set(synonyms.split()) - served.keys()
        if unknown:
            raise KeyError(f"{unknown} are no flags of quire serve")
        note = note.replace("CHOICES", _choices(synonyms.split()[0]))
        rows.append((_codes(synonyms), f"the same; {note}" if note else "the same"))
    for synonyms in names["flags"]:
        others = [flag for flag in synonyms.split() if flag not in served]
        here = dict.fromkeys(INSTEAD.get(flag) or FAMILIES[flag] for flag in others)
        if not here:
            raise KeyError(f"{synonyms} is a flag of quire serve; list it under `same`")
        rows.append((_codes(synonyms), _cell("; ".join(here))))
    return table(("There", "Here"), rows)


def coming_fields(names: Mapping[str, Any]) -> str:
    """Return the fields with the same name and meaning, and a table of the others."""
    properties = openapi()["components"]["schemas"]
    served = {
        name
        for body in BODIES
        for name in properties[body]["properties"]
        if _is_served(properties[body], name)
    }
    treated = {name.strip("`"): text for name, text in documented()}
    same = [name for name in names["fields"] if name in served]
    others = [(f"`{name}`", treated[name]) for name in names["fields"] if name not in served]
    return f"The same: {_codes(' '.join(same))}.\n\n" + foreign("Others", others)


def coming_paths(names: Mapping[str, Any]) -> str:
    """Return a table of paths and subcommands."""
    paths = [(f"`{path}`", _cell(FOREIGN_PATHS[path])) for path in names["paths"]]
    commands = [(f"`{name}`", FOREIGN_SUBCOMMANDS[name]) for name in names["subcommands"]]
    return table(("There", "Here"), [*paths, *commands])


def _served_flags() -> Mapping[str, argparse.Action]:
    """Return the flags of `quire serve`."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    return parser._option_string_actions


def _choices(flag: str) -> str:
    """Return the values that a flag of `quire serve` takes, where they are few."""
    return ", ".join(f"`{value}`" for value in _served_flags()[flag].choices or ())


def _codes(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _coming() -> dict[str, tuple[tuple[str, Callable[[], str]], ...]]:
    pages = {}
    for names in foreign_names().values():
        pages[names["page"]] = (
            ("flags", partial(coming_flags, names)),
            ("fields", partial(coming_fields, names)),
            ("paths", partial(coming_paths, names)),
        )
    return pages


PARTS: Mapping[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "flags.md": (("flags", flags),),
    "routes.md": (("routes", routes),),
    "router.md": (("route flags", route_flags),),
    "errors.md": (("errors", errors), ("exit codes", exit_codes)),
    "request-fields.md": (("fields", fields), ("other fields", other_fields)),
    "metrics.md": (("metrics", metrics), ("vllm names", vllm_metrics)),
    "compatibility.md": (
        ("foreign fields", lambda: foreign("Field", documented())),
        ("foreign paths", lambda: foreign("Path", _named(FOREIGN_PATHS))),
        ("foreign flags", lambda: foreign("Flag", _named({**INSTEAD, **FAMILIES}))),
        ("foreign subcommands", lambda: foreign("Subcommand", _named(FOREIGN_SUBCOMMANDS))),
    ),
    **_coming(),
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with its text and the text it should have."""
    for name, parts in PARTS.items():
        text = wanted = (DOCS / name).read_text(encoding="utf-8")
        for part, make in parts:
            begin, end = f"<!-- generated: {part} -->", f"<!-- end of {part} -->"
            before, rest = wanted.split(begin)
            wanted = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
        yield DOCS / name, text, wanted


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a page is not current")
    arguments = parser.parse_args()
    for path, text, wanted in pages():
        if text == wanted:
            continue
        if arguments.check:
            sys.exit(f"docs/{path.name} is not current; run python scripts/reference_pages.py")
        path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
