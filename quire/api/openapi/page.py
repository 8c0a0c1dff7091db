"""/docs: the OpenAPI document as an HTML page.

Plain HTML with an inlined style sheet (page.css), complete without scripts. Where the server has
the web page, its script try.js adds a form to each operation; the page's policy allows no other
script and no resource of another host. Knows the document and the groups of its fields, not the
server. Always holds: every text of the document is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from quire.api.openapi.error_words import error_rows
from quire.api.openapi.field_words import GROUPS
from quire.api.openapi.schema_words import default_of, words_of

Schema = Mapping[str, Any]

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_SCRIPTS = "script-src 'self'; connect-src 'self'; "
_FILES = "/web/{file}"
_PAGES = frozenset({"/", "/docs", _FILES})
# Stands for the address of the request, which replaces it in each response.
ORIGIN = "\0origin\0"


def headers(*, has_script: bool) -> dict[str, str]:
    """Return the headers of the page. has_script: the server has the web page's files."""
    return {
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "content-security-policy": (
            f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; "
            f"{_SCRIPTS if has_script else ''}base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'"
        ),
        "referrer-policy": "same-origin",
        "x-content-type-options": "nosniff",
    }


def written(document: Schema) -> bytes:
    """Return the page, with ORIGIN in place of the server's address."""
    paths = document["paths"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    groups: dict[str, list[tuple[str, str, Schema]]] = {}
    for method, path, operation in operations:
        groups.setdefault(operation["tags"][0], []).append((method, path, operation))
    main = "".join(_group(document, tag, listed) for tag, listed in groups.items())
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Quire: the API</title><style>{_STYLE}</style>{_script(document)}</head><body>"
        f"{_contents(groups)}<main>{_opening(document)}{main}{_errors(document)}</main></body></html>"
    )
    return page.encode()


def _contents(groups: Mapping[str, list[tuple[str, str, Schema]]]) -> str:
    parts = ['<nav><a class="name" href="#top">Quire</a>']
    for tag, listed in groups.items():
        links = "".join(
            f'<li><a href="#{_anchor(operation)}">{_method(method)} '
            f"<code>{_breakable(path)}</code></a></li>"
            for method, path, operation in listed
        )
        parts.append(f"<h2>{escape(tag)}</h2><ul>{links}</ul>")
    return "".join([*parts, '<h2>All</h2><ul><li><a href="#errors">Errors</a></li></ul></nav>'])


def _opening(document: Schema) -> str:
    if "/v1/chat/completions" not in document["paths"]:
        return _title(document)
    model = _model_of(document)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Write a story about a little dog."}],
            "max_tokens": 48,
            "seed": 7,
        }
    ).replace("], ", "],\n      ")
    has_keys = "securitySchemes" in document["components"]
    key = "KEY" if has_keys else "none"
    curl = _curl("POST", "/v1/chat/completions", body, needs_key=has_keys)
    python = (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{ORIGIN}/v1", api_key="{key}")\n'
        "stream = client.chat.completions.create(\n"
        + (
            f"    model={json.dumps(model)},\n"
            if model
            else "    model=client.models.list().data[0].id,\n"
        )
        + '    messages=[{"role": "user", "content": "Write a story about a little dog."}],\n'
        "    seed=7,\n    stream=True,\n)\n"
        "for chunk in stream:\n"
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
    )
    return (
        f"{_title(document)}"
        f"<figure><figcaption>curl</figcaption>{_pre(curl)}</figure>"
        f"<figure><figcaption>Python, with the openai client</figcaption>{_pre(python)}</figure>"
    )


def _title(document: Schema) -> str:
    model = _model_of(document)
    served = f" It serves <code>{escape(model)}</code>." if model else ""
    needs = (
        "<p>Requests need <code>Authorization: Bearer KEY</code>, except at paths that say "
        "otherwise.</p>"
        if _has_keys(document)
        else ""
    )
    keys = ' data-keys="true"' if _has_keys(document) else ""
    return (
        f'<header id="top"{keys}><h1>Quire '
        f"<small>{escape(document['info']['version'])}</small></h1>"
        f"<p>A language model behind OpenAI's API.{served}</p>"
        f"<p>{escape(document['info']['description'])}</p>{needs}"
        '<p class="links"><a href="openapi.json">openapi.json</a> '
        '<a href="health">health</a> <a href="version">version</a></p></header>'
    )


def _group(document: Schema, tag: str, listed: Iterable[tuple[str, str, Schema]]) -> str:
    inner = "".join(_operation(document, *one) for one in listed)
    return f"<section><h2>{escape(tag)}</h2>{inner}</section>"


def _operation(document: Schema, method: str, path: str, operation: Schema) -> str:
    body = operation.get("requestBody")
    example, form = None, ""
    if body is not None:
        ((media, content),) = body["content"].items()
        if media == "application/json":
            example = json.dumps(content["example"])
        else:
            form = " ".join(
                f"-F {name}={_form_value(name, value)}"
                for name, value in content["example"].items()
            )
    needs_key = "security" in operation
    return (
        f'<article id="{_anchor(operation)}"{_for_script(method, path, example)}>'
        f"<h3>{_method(method)} <code>{_breakable(path)}</code>"
        f"{'' if needs_key or not _has_keys(document) else ' <small>needs no key</small>'}</h3>"
        f"<p>{escape(operation['summary'])}</p>"
        f"{_parameters(operation)}{_fields(document, operation)}"
        f"{_responses(operation)}{_pre(_curl(method, path, example, form, needs_key=needs_key))}"
        "</article>"
    )


def _script(document: Schema) -> str:
    """Return the element of the script that adds forms, if the server has it."""
    if _FILES not in document["paths"]:
        return ""
    root_path = document.get("servers", [{"url": ""}])[0]["url"]
    return f'<script type="module" src="{escape(root_path)}/web/try.js"></script>'


def _for_script(method: str, path: str, example: str | None) -> str:
    """Return what the script needs to know of an operation; nothing for pages."""
    if path in _PAGES:
        return ""
    pretty = "" if example is None else json.dumps(json.loads(example), indent=2)
    return f' data-method="{method}" data-path="{escape(path)}" data-example="{escape(pretty)}"'


def _parameters(operation: Schema) -> str:
    found = operation.get("parameters")
    if not found:
        return ""
    rows = "".join(
        f"<tr><th><code>{escape(one['name'])}</code></th>"
        f"<td>{escape(words_of(one['schema']))}</td><td>{escape(one['description'])}</td></tr>"
        for one in found
    )
    return _table(("In path, query or head", "What it may be", ""), rows)


def _fields(document: Schema, operation: Schema) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    (content,) = body["content"].values()
    name = content["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    properties, needed = schema.get("properties", {}), schema.get("required", [])  # a list has none
    honoured = {name: one for name, one in properties.items() if "x-quire" not in one}
    refused = {n: one for n, one in properties.items() if one.get("x-quire") == "refused"}
    free = [name for name, one in properties.items() if one.get("x-quire") == "no effect"]
    first = _field_table({name: honoured[name] for name in needed}, "Must be given")
    parts = []
    for group, words in GROUPS.items():
        inner = {n: honoured[n] for n in words if n in honoured and n not in needed}
        if inner:
            count = f" <small>{len(inner)}</small>"
            parts.append(
                f"<details><summary>{escape(group)}{count}</summary>{_field_table(inner)}</details>"
            )
    if not refused:
        return first
    synonyms = {n: one for n, one in properties.items() if one.get("x-quire") == "synonym"}
    hints = [name for name, one in properties.items() if one.get("x-quire") == "hint"]
    parts.append(
        f"<details><summary>Refused by name <small>{len(refused)}</small></summary>"
        f"{_field_table(refused, values='Accepted')}</details>"
        f"<details><summary>Accepted without effect <small>{len(free)}</small></summary>"
        f"<p>{_names(free)}: at any value of their type, because they cannot change the answer.</p>"
        f"<p>{_names(hints)}: hints, listed in the header x-quire-ignored-fields.</p></details>"
        f"<details><summary>Other names <small>{len(synonyms)}</small></summary>"
        f"{_field_table(synonyms)}</details>"
    )
    return first + "".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"<code>{escape(name)}</code>" for name in names)


def _field_table(
    fields: Mapping[str, Schema], title: str = "Field", *, values: str = "What it may be"
) -> str:
    if not fields:
        return ""
    rows = "".join(
        f"<tr><th><code>{escape(name)}</code></th><td>{escape(words_of(dict(schema)) or 'null')}"
        f"{_default(schema)}</td><td>{escape(schema['description'])}</td></tr>"
        for name, schema in fields.items()
    )
    return _table((title, values, ""), rows)


def _default(schema: Schema) -> str:
    default = default_of(dict(schema))
    return f" <small>default {escape(default)}</small>" if default else ""


def _responses(operation: Schema) -> str:
    listed = []
    for status, response in operation["responses"].items():
        for media, content in response["content"].items():
            shown = content.get("x-quire-event", content["schema"])
            name = shown["$ref"].rpartition("/")[2] if "$ref" in shown else "text"
            if name != "Error":
                each = "events of " if media == "text/event-stream" else ""
                listed.append(f"<b>{status}</b> {each}{_schema_link(name)}")
    codes = [
        status for status, one in operation["responses"].items() if "code" in one["description"]
    ]
    refused = f'; <a href="#errors">errors</a> {", ".join(codes)}' if codes else ""
    return f'<p class="answers">{" or ".join(listed)}{refused}</p>'


def _schema_link(name: str) -> str:
    return "text" if name == "text" else f'<a href="#schema-{escape(name)}">{escape(name)}</a>'


def _errors(document: Schema) -> str:
    sent = {
        (status, code)
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, response in operation["responses"].items()
        for code in response.get("x-quire-codes", ())
    }
    rows = "".join(
        f"<tr><th>{row.status}</th><td><code>{row.code or 'null'}</code></td>"
        f"<td>{escape(row.meaning)} {_marked(row.advice)}</td></tr>"
        for row in error_rows()
        if (str(row.status), row.code or "null") in sent
    )
    shape = (
        '{"error": {"message": "what was found, what is allowed, what to do",\n'
        '           "type": "invalid_request_error", "param": "temperature", '
        '"code": "invalid_value"}}'
    )
    schemas = document["components"]["schemas"]
    answers = "".join(
        f'<details id="schema-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_pre(json.dumps(schema, indent=2))}</details>"
        for name, schema in sorted(schemas.items())
        if not name.endswith("Request")
    )
    return (
        '<section id="errors"><h2>Errors</h2>'
        "<p>Every error has this form, inside a stream as one event. <code>param</code> names the "
        f"field at fault, where one is.</p>{_pre(shape)}{_table(('Status', 'code', ''), rows)}"
        f"</section><section><h2>Answers</h2><p>As JSON Schema.</p>{answers}</section>"
    )


def _marked(text: str) -> str:
    """Return text in which backticks mark code."""
    parts = escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))


def _table(head: tuple[str, ...], rows: str) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    head_row = f"<thead><tr>{titles}</tr></thead>"
    return f'<div class="wide"><table>{head_row}<tbody>{rows}</tbody></table></div>'


def _form_value(name: str, value: str) -> str:
    return f"@{value}" if name == "file" else value


def _curl(method: str, path: str, body: str | None, form: str = "", *, needs_key: bool) -> str:
    parts = [f"curl {ORIGIN}{path}"]
    if method not in ("GET", "POST") or (method == "POST" and body is None and not form):
        parts[0] = f"curl -X {method} {ORIGIN}{path}"
    if needs_key:
        parts.append('-H "Authorization: Bearer KEY"')
    if body is not None:
        parts += ['-H "Content-Type: application/json"', f"-d '{body}'"]
    if form:
        parts.append(form)
    return " \\\n  ".join(parts)


def _has_keys(document: Schema) -> bool:
    return "securitySchemes" in document["components"]


def _model_of(document: Schema) -> str:
    request = document["components"]["schemas"].get("ChatRequest", {"properties": {"model": {}}})
    names = request["properties"]["model"].get("enum", [""])
    return str(names[0])


def _pre(code: str) -> str:
    return f"<pre><code>{escape(code, quote=False)}</code></pre>"


def _method(method: str) -> str:
    return f'<span class="method {method.lower()}">{method}</span>'


def _breakable(path: str) -> str:
    """Return a path that may be wrapped after its slashes."""
    return escape(path).replace("/", "/<wbr>")


def _anchor(operation: Schema) -> str:
    return escape(operation["operationId"])
