"""The admin key file: keys that open what changes things for everybody, one a line.

A key stands there as it is, or as sha256:DIGEST, so that the file tells no key. Standard library
only, so that a wrong file is told before anything is loaded. Knows no HTTP. Always holds: a file
that is named has a key, or is refused; keys leave this file as digests only.
"""

from __future__ import annotations

import re
from pathlib import Path

from quire.base.errors import SettingError
from quire.config.tenants import key_digest

_HASHED = "sha256:"


def read_admin_keys(path: str | None) -> tuple[str, ...]:
    """SHA-256 in hex of the keys of an admin key file: one a line, without empty lines and those
    that begin with #.

    None: there is no such file. Raises SettingError where it cannot be read or has no key.
    """
    if path is None:
        return ()
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"the admin key file {path} cannot be read ({error}); give a text file with a key a "
            "line (--admin-key-file)"
        ) from error
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    digests = tuple(_digest(path, number, key) for number, key in keys if not key.startswith("#"))
    if not digests:
        raise SettingError(f"the admin key file {path} has no key; write one a line")
    return digests


def _digest(path: str, number: int, key: str) -> str:
    if not key.startswith(_HASHED):
        return key_digest(key)
    digest = key.removeprefix(_HASHED).lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise SettingError(
            f"the admin key file {path}: line {number} begins with {_HASHED} and goes on with "
            f"{len(digest)} characters that are no digest; write a key's SHA-256 in 64 hex digits"
        )
    return digest
