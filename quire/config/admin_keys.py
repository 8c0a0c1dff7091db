"""The admin key file: keys that grant access to the admin routes, one a line.

A key is written in plain text or as sha256:DIGEST. Uses the standard library only, so that an
invalid file is reported before anything is loaded. Invariant: a file has at least one key, and only
digests of keys are returned.
"""

from __future__ import annotations

import re
from pathlib import Path

from quire.base.errors import SettingError
from quire.config.tenants import key_digest

_HASHED = "sha256:"


def read_admin_keys(path: str | None) -> tuple[str, ...]:
    """Return the SHA-256 digests, in hex, of the keys in an admin key file; () for None.

    Empty lines and lines that begin with # are skipped. Raises SettingError if the file cannot be
    read or has no key.
    """
    if path is None:
        return ()
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"the admin key file {path} cannot be read ({error}); give a text file with one key "
            "per line (--admin-key-file)"
        ) from error
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    digests = tuple(_digest(path, number, key) for number, key in keys if not key.startswith("#"))
    if not digests:
        raise SettingError(f"the admin key file {path} has no key; write one per line")
    return digests


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
