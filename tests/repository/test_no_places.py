"""Places: no kept file contains paths of a machine, or the location of external data."""

from __future__ import annotations

import re

from tests.repository.source_files import name_of, text_files

_SLASH = "/"  # the patterns are concatenated so that this file does not match itself
_MACHINE = re.compile(
    rf"(?<![\w.]){_SLASH}(work|root|home|Users|mnt|opt|srv|nfs|scratch){_SLASH}(?!\.\.)\w"
)
_REGISTRY = re.compile(
    r"https?:/{2}[\w.:-]*(artifact|nexus|mirror|proxy|registry)[\w.-]*|pypi\.(?!org)|"
    r"(?<!extra-)" + "index" + r"-url\b"
)
_OUTSIDE = re.compile(r"\bshared" + r"[/\"' ,]{1,5}(data|design|anchors)\b")
_NUMBERED = re.compile(r"\bissue" + r" #?\d+\b", re.I)
_BY_NAME = re.compile(r"pip install [^`]{0,40}(?<![\w/.-])quire(?![\w/-])")
_KNOW_THE_DATA = ("tests/data.py", "bench/data.py", "models/tiny/")


def _found(pattern: re.Pattern[str], allowed: tuple[str, ...] = ()) -> list[str]:
    hits = []
    for file in text_files():
        if name_of(file).startswith(allowed or ("\0",)):
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if pattern.search(line):
                hits.append(f"{name_of(file)}:{number} {line.strip()[:80]}")
    return hits


def test_the_patterns_match_examples() -> None:
    assert _MACHINE.search("cd " + "/".join(["", "home", "me", "quire"]))
    assert not _MACHINE.search("docs/home/page and https://example.org/work/x")
    assert _OUTSIDE.search("../shar" + "ed/data")
    assert _REGISTRY.search("https://" + "artifactory.example.org/simple")
    assert _NUMBERED.search("see issue" + " 12")
    assert _BY_NAME.search("pip install" + " 'quire[gpu]'")
    assert _BY_NAME.search("pip install" + " --upgrade quire")
    assert not _BY_NAME.search("pip install" + " 'quire-llm[gpu]'")
    assert not _BY_NAME.search("pip install" + " ./quire_llm-0.1.0.whl")


def test_no_path_of_a_machine_is_kept() -> None:
    assert not _found(_MACHINE)


def test_no_package_registry_is_named() -> None:
    assert not _found(_REGISTRY)


def test_only_one_file_per_directory_locates_external_data() -> None:
    assert not _found(_OUTSIDE, _KNOW_THE_DATA)


def test_no_issue_is_named_by_number() -> None:
    assert not _found(_NUMBERED)


def test_no_page_installs_the_distribution_of_another_project() -> None:
    """Require `quire-llm`: on the package index, `quire` is another project."""
    assert not _found(_BY_NAME)
