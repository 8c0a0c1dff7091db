"""Files with a key that processes of several machines share and prove to each other.

Always holds: a key is long enough not to be guessed, and no other user of the machine can read it.
"""

from __future__ import annotations

import stat

from quire.base.errors import SettingError
from quire.base.user_path import user_path

MIN_KEY_BYTES = 16
_MAX_KEY_BYTES = 4096


def how_to_make_key(path: str) -> str:
    """Return the advice of errors about a key file that is missing or unusable."""
    return f"make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"


def read_shared_key(path: str, setting: str) -> bytes:
    """Return the key in a file, which `setting` names. Raises SettingError where it is not secret,
    or short."""
    file = user_path(path)
    advice = how_to_make_key(path)
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            key = opened.read(_MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise SettingError(
            f"{setting} {path} cannot be read ({error.strerror}); {advice}"
        ) from error
    if mode & 0o077:
        raise SettingError(
            f"{setting} {path} can be read by other users (mode {mode:o}); chmod 600 it"
        )
    if not MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise SettingError(
            f"{setting} {path} has {len(key)} bytes; {MIN_KEY_BYTES} to {_MAX_KEY_BYTES} are "
            f"allowed; {advice}"
        )
    return key
