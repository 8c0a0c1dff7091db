"""Files of keys, one a line: admin keys, which grant access to the admin routes, and API keys.

An admin key is written in plain text or as sha256:DIGEST, an API key in plain text. Uses the
standard library only, so that an invalid file is reported before anything is loaded. Invariant: a
file has at least one key, and only digests of admin keys are returned.
"""

from __future__ import annotations

import re

from quire.base.errors import SettingError
from quire.base.user_path import user_path
from quire.config.tenants import key_digest

_HASHED = "sha256:"


def read_admin_keys(path: str | None) -> tuple[str, ...]:
    """Return the SHA-256 digests, in hex, of the keys in an admin key file; () for None.

    Empty lines and lines that begin with # are skipped. Raises SettingError if the file cannot be
    read or has no key.
    """
    if path is None:
        return ()
    keys = _lines_with_keys(path, "admin key file", "--admin-key-file")
    return tuple(_digest(path, number, key) for number, key in keys)


def read_api_keys(path: str | None) -> tuple[str, ...]:
    """Return the keys in an API key file; () for None. Lines are skipped as in `read_admin_keys`.

    Raises SettingError if the file cannot be read, has no key, or has the digest of one.
    """
    if path is None:
        return ()
    keys = _lines_with_keys(path, "API key file", "--api-key-file")
    for number, key in keys:
        if key.startswith(_HASHED):
            raise SettingError(
                f"the API key file {path}: line {number} begins with {_HASHED}; write the key "
                "itself, or put the digest in a file of --tenants or --admin-key-file"
            )
    return tuple(key for _, key in keys)


def _lines_with_keys(path: str, what: str, flag: str) -> list[tuple[int, str]]:
    try:
        lines = user_path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(
            f"the {what} {path} cannot be read ({reason}); give a text file with one key per line "
            f"({flag})"
        ) from error
    stripped = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, key) for number, key in stripped if key and not key.startswith("#")]
    if not keys:
        raise SettingError(f"the {what} {path} has no key; write one per line")
    return keys


def _digest(path: str, number: int, key: str) -> str:
    if not key.startswith(_HASHED):
        return key_digest(key)
    digest = key.removeprefix(_HASHED).lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise SettingError(
            f"the admin key file {path}: line {number} begins with {_HASHED}, but its "
            f"other {len(digest)} characters are no digest; write a key's SHA-256 in 64 hex digits"
        )
    return digest
