"""Check the prose of this repository, and measure its vocabulary.

`python scripts/prose_lint.py` fails on three rules: prose lines over 100 columns in Markdown,
Python and C++; personified subjects (`who runs`, `nobody is told`) in comments, docstrings,
messages and pages; identifiers that begin with `most_` or `least_` (write `max_` and `min_`).
`--rates` prints how often groups of words occur per 10,000 words of each package instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("quire", "native", "bench", "tests", "models", "docs", "examples", "scripts")
SUFFIXES = (".py", ".md", ".cc", ".h")
# Generated, built, or text that is data: recorded answers, trained stories, measured results.
SKIPPED = (
    *("__pycache__", "results", "recorded", "checkpoints", "build"),
    *("box", "box_draft", "box_eagle"),
)
# Pages that a script writes from docstrings: the lint checks those where they stand.
GENERATED = ("docs/reading.md",)
# Nested packages are listed as `quire/execute/gpu`; everything else by its first two folders.
NESTED = ("quire/execute/gpu", "quire/api/openapi")
# Only here are string literals prose: messages and help texts. Tests and models quote stories.
MESSAGES = ("quire", "bench")
MAX_COLUMNS = 100

GROUPS = {
    "who": re.compile(r"\b(?:who|whom|whose|whoever|whomever)\b", re.I),
    "tell": re.compile(r"\b(?:tell|tells|told|telling)\b", re.I),
    "nobody": re.compile(r"\b(?:nobody|somebody|anybody|everybody)\b", re.I),
    "field": re.compile(
        r"\b(?:pre-?fill\w*|decod(?:e|es|ed|ing)|batch\w*|latenc\w+|throughput|evict\w*|"
        r"preempt\w*|schedul\w+|offload\w*|detokeniz\w+)\b",
        re.I,
    ),
}
PERSONIFIED = ("who", "tell", "nobody")
_IDENTIFIER = re.compile(r"\b_?(?:most|least|MOST|LEAST)_\w+")
# Of collections.Counter; the module of the routing policy `least-tokens`.
_STANDARD = frozenset({"most_common", "least_tokens"})
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
# Names of code and quoted text are not this repository's prose.
_QUOTED = re.compile(r"`[^`\n]*`|https?://\S+|\"[^\"\n]*\"")
# Comments for tools may stand beyond the columns, as in ruff.
_PRAGMA = re.compile(r"\s+# (?:type: ignore|noqa|fmt:)\S*$")
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule."""

    rule: str
    place: str
    text: str


def files() -> Iterator[Path]:
    """Yield every source file and page, in order."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            inner = path.relative_to(ROOT).parts[:-1]
            is_skipped = any(part in SKIPPED for part in inner)
            is_generated = path.relative_to(ROOT).as_posix() in GENERATED
            if path.suffix in SUFFIXES and not is_skipped and not is_generated:
                yield path


def package_of(name: str) -> str:
    """Return the package of a file: `quire/api`, `docs`, or the name of a top-level page."""
    for nested in NESTED:
        if name.startswith(nested + "/"):
            return nested
    parts = name.split("/")
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


def prose_of(path: Path, text: str) -> list[tuple[int, str]]:
    """Return the lines of prose with their numbers: comments, docstrings, messages, Markdown."""
    if path.suffix == ".md":
        return list(_markdown(text))
    if path.suffix != ".py":
        return [
            (text.count("\n", 0, match.start()) + 1 + offset, line)
            for match in _CPP_COMMENT.finditer(text)
            for offset, line in enumerate(match[0].splitlines())
        ]
    top = path.relative_to(ROOT).parts[0]
    return sorted([*_comments(text), *_strings(text, with_messages=top in MESSAGES)])


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines outside code blocks and generated parts, which quote the code's own texts."""
    in_code = is_generated = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("<!-- "):
            is_generated = line.startswith("<!-- generated: ")
        elif line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not is_generated:
            yield number, line


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _strings(text: str, *, with_messages: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) in docstrings or (with_messages and len(node.value.split()) > 2):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def identifiers_of(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the identifiers of a source file that begin with `most_` or `least_`."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            name = token.string
            is_ours = token.type == tokenize.NAME and name not in _STANDARD
            if is_ours and _IDENTIFIER.fullmatch(name):
                yield token.start[0], name
    elif path.suffix in (".cc", ".h"):
        blank = _CPP_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in _IDENTIFIER.finditer(blank):
            yield blank.count("\n", 0, match.start()) + 1, match[0]


def findings_of(path: Path) -> Iterator[Finding]:
    """Yield what breaks a rule in one file."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for number, line in prose_of(path, text):
        where = f"{name}:{number}"
        plain = _QUOTED.sub(" ", line)
        for group in PERSONIFIED:
            if match := GROUPS[group].search(plain):
                yield Finding("personified", where, f"{match[0]!r} in: {line.strip()}")
        whole = _PRAGMA.sub("", lines[number - 1] if number <= len(lines) else line)
        if len(whole) > MAX_COLUMNS and not _is_unbreakable(path, whole):
            yield Finding("columns", where, f"{len(whole)} columns")
    for number, identifier in identifiers_of(path, text):
        yield Finding("identifiers", f"{name}:{number}", identifier)


def _is_unbreakable(path: Path, line: str) -> bool:
    """Return whether a line cannot be wrapped: a row of a table, one long word or link."""
    if path.suffix == ".md" and line.lstrip().startswith("|"):
        return True
    return " " not in line.strip().lstrip("#-*/ ")


def lint() -> int:
    """Print what breaks a rule, and return the exit status."""
    found = [finding for path in files() for finding in findings_of(path)]
    for finding in found:
        print(f"{finding.place}: {finding.rule}: {finding.text}")
    return int(bool(found))


def rates() -> None:
    """Print occurrences per 10,000 words of prose, for each package and in total."""
    words: Counter[str] = Counter()
    hits: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files():
        package = package_of(path.relative_to(ROOT).as_posix())
        for _, line in prose_of(path, path.read_text(encoding="utf-8")):
            for key in {package, package.split("/")[0], "total"}:
                plain = _QUOTED.sub(" ", line)
                words[key] += len(_WORD.findall(plain))
                hits[key].update({name: len(p.findall(plain)) for name, p in GROUPS.items()})
    print(f"{'package':24}{'words':>8}" + "".join(f"{name:>8}" for name in GROUPS))
    for key in sorted(words, key=lambda name: (name == "total", name)):
        shown = (1e4 * hits[key][name] / max(words[key], 1) for name in GROUPS)
        print(f"{key:24}{words[key]:8,}" + "".join(f"{rate:8.1f}" for rate in shown))


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--rates", action="store_true", help="print word rates per 10,000 words")
    arguments = parser.parse_args()
    if arguments.rates:
        rates()
    else:
        sys.exit(lint())


if __name__ == "__main__":
    main()
