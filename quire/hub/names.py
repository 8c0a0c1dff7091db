"""Parse a model's name on the Hugging Face Hub: ORG/NAME[@REVISION][:FILE].

    hub_name("Qwen/Qwen3-0.6B")                    # the default revision, main
    hub_name("ORG/NAME@v1.0:NAME-Q4_K_M.gguf")     # one GGUF file of a revision

FILE may also be a quantization, such as Q4_K_M, where one GGUF file of the repository has it. An
existing path is never a name: a directory `Qwen/Qwen3-0.6B` takes precedence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from quire.base.errors import SettingError
from quire.base.show import show
from quire.base.user_path import user_path

DEFAULT_REVISION = "main"
MAX_NAME_CHARS = 96  # of ORG/NAME, as the hub limits it
_NAME = re.compile(r"(?P<repo>[^/@:~]+/[^/@:]+)(?:@(?P<revision>[^:]*))?(?::(?P<file>.*))?", re.S)
_ADDRESS = re.compile(
    r"(?:https?://[\w.:-]+/|hf:/*|(?:www\.)?(?:hf\.co|huggingface\.co)/)"
    r"(?P<name>[\w.-]+/[\w.-]+(?::[\w.-]+)?)(?:[/?#]|$)",
    re.A,
)
_PART = re.compile(r"[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?", re.A)
_REVISION = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.A)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository, a revision (branch, tag or commit) and a GGUF file of it ("" for none)."""

    repo: str
    revision: str = DEFAULT_REVISION
    file: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{at}{self.file and ':' + self.file}"


def hub_name(text: str) -> HubName | None:
    """Return the parsed name; None where `text` is an existing path or no name at all."""
    return None if _exists(text) else parsed_name(text)


def parsed_name(text: str) -> HubName | None:
    """Return the parsed name, whether or not there is such a path; None where it is no name."""
    match = _NAME.fullmatch(text)
    if match is None or not _is_repo(match["repo"]):
        return None
    revision, file = match["revision"], match["file"]
    if revision is not None and not is_revision(revision):
        return None
    if file is not None and not is_safe_path(file):
        return None
    return HubName(repo=match["repo"], revision=revision or DEFAULT_REVISION, file=file or "")


def required_name(text: str, revision: str | None = None) -> HubName:
    """Return the parsed name of a command that takes no path. Raises SettingError.

    revision: the value of --revision, if given.
    """
    name = parsed_name(text)
    if name is None and text and _exists(text):
        raise SettingError(
            f"{show(text)} is a path on this machine, so there is nothing to download; run it "
            "with quire serve, or give ORG/NAME of a model on the Hugging Face Hub"
        )
    if name is None:
        of_address = _ADDRESS.match(text)
        hint = f"; did you mean {of_address['name']}?" if of_address else ""
        raise SettingError(
            f"{show(text)} is not a model's name on the Hugging Face Hub; write ORG/NAME, as in "
            f"Qwen/Qwen3-0.6B, or ORG/NAME:FILE.gguf for a GGUF file{hint}"
        )
    if revision is None:
        return name
    if not is_revision(revision):
        raise SettingError(
            f"--revision is {show(revision)}; a branch, a tag or a commit is allowed, as in main, "
            "v1.0 or a commit's 40 digits"
        )
    if name.revision not in (DEFAULT_REVISION, revision):
        raise SettingError(
            f"{show(text)} names revision {name.revision}, and --revision {revision}; give one"
        )
    return replace(name, revision=revision)


def is_revision(text: str) -> bool:
    """Return whether a text may be a branch, tag or commit; also a safe relative path."""
    return _REVISION.fullmatch(text) is not None and is_safe_path(text)


def is_safe_path(path: str) -> bool:
    """Return whether a path of a repository stays inside a directory it is joined to."""
    parts = path.split("/")
    return (
        path.isprintable()  # no control characters or lone surrogates; names are shown to users
        and 0 < len(path.encode()) <= 1024
        and "\\" not in path
        and not any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    )


def _is_repo(repo: str) -> bool:
    return (
        len(repo) <= MAX_NAME_CHARS
        and all(_PART.fullmatch(part) for part in repo.split("/"))
        and "--" not in repo
        and ".." not in repo
    )


def _exists(text: str) -> bool:
    try:
        return user_path(text).exists()
    except (OSError, RuntimeError, ValueError):
        return False
