"""The admin key file: keys that open what changes things for everybody, one a line.

Standard library only, so that a wrong file is told before anything is loaded. Knows no HTTP.
Always holds: a file that is named has a key, or is refused.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import SettingError


def read_admin_keys(path: str | None) -> tuple[str, ...]:
    """The keys of an admin key file: one a line, without empty lines and those that begin with #.

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
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise SettingError(f"the admin key file {path} has no key; write one a line")
    return keys
