"""What to do where the compiled part of the package, quire._native, is missing.

It is missing in a checkout that was not built, and in one that comes before an installed package on
the path. Imports nothing of the package but the errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from quire.base.errors import SettingError

NATIVE = "quire._native"
_PACKAGE = Path(__file__).resolve().parents[1]


@contextmanager
def names_missing_build() -> Iterator[None]:
    """Raise SettingError, with what to do, in place of the import error of quire._native."""
    try:
        yield
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == NATIVE
        if not is_missing and not (error.name == "quire" and "'_native'" in error.msg):
            raise
        raise SettingError(
            f"{NATIVE}, the compiled part of Quire, is not in {_PACKAGE}: this is a source "
            "checkout that was not built, or one that hides an installed package. Run `make demo` "
            "or `pip install .` in the checkout, or start from another directory"
        ) from None


def require_native() -> None:
    """Raise SettingError if quire._native is missing."""
    with names_missing_build():
        import_module(NATIVE)
