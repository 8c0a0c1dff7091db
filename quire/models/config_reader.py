"""ConfigReader: takes values out of a JSON configuration one by one and remembers every problem.

A key is read, or it is on a list of keys known not to matter, or it is a problem: so a setting
that would change the answer is never passed over. All problems are reported together, each with
what was found, what is allowed, and the file. Knows JSON values; knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.base.errors import ConfigError
from quire.base.regular_file import LFS_POINTER, read_regular
from quire.base.show import show
from quire.base.strict_json import parse_object

MAX_CONFIG_BYTES = 4 << 20

Number = TypeVar("Number", int, float)


def load_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ConfigError."""
    try:
        raw = read_regular(path, limit_bytes=MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if raw.startswith(LFS_POINTER):
        raise ConfigError(f"{path}: a pointer of Git LFS, not the file itself; run git lfs pull")
    try:
        return parse_object(raw, limit_bytes=MAX_CONFIG_BYTES)
    except ValueError as error:
        raise ConfigError(
            f"{path}: {error}; the file is damaged: copy or download it again"
        ) from error


class ConfigReader:
    """Reads one object. Every method marks its key as seen; null counts as absent.

    A method that finds a problem notes it and returns a harmless value, so that reading goes on;
    `finish` raises ConfigError with everything that was noted.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        self.where = where
        self.problems: list[str] = []
        self.ids_past: dict[str, tuple[int, ...]] = {}
        self._values = values
        self._seen: set[str] = set()
        self._unusable: set[str] = set()  # keys with a problem, of which a harmless value was made

    def has(self, key: str) -> bool:
        """Is the key there, and not null? Does not mark it as seen."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Is the key there with null, where null and absence differ? Does not mark it as seen."""
        return key in self._values and self._values[key] is None

    def take(self, key: str) -> Any:
        """Return the raw value, None where absent."""
        self._seen.add(key)
        return self._values.get(key)

    def note(self, problem: str, *, of: Iterable[str] = ()) -> None:
        """Remember a problem; once, though two readers may meet it.

        of: keys with values that the problem follows from. It is not noted where one of them has a
        problem of its own: its value is made up then.
        """
        if problem not in self.problems and self._unusable.isdisjoint(of):
            self.problems.append(problem)

    def whole(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """Return a whole number from low to high; required where there is no default."""
        value = self.take(key)
        if value is None:
            return self._absent(key, f"a whole number from {low} to {high}", default, low)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._wrong(key, value, f"a whole number from {low} to {high}")
            return low
        return value

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Return a finite number from low to high; required where there is no default."""
        value = self.take(key)
        if value is None:
            return self._absent(key, f"a number from {low:g} to {high:g}", default, low)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, value, f"a number from {low:g} to {high:g}")
            return low
        if not math.isfinite(value) or not low <= value <= high:
            self._wrong(key, value, f"a number from {low:g} to {high:g}")
            return low
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
            return default
        return value

    def choice(self, key: str, allowed: Mapping[str, str], *, default: str) -> str:
        """Read one of the words in `allowed`; return what that word stands for."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            self._wrong(key, value, "one of " + ", ".join(allowed))
            return default
        return allowed[value]

    def ids(self, key: str, vocab_size: int, *, past: bool = False) -> tuple[int, ...]:
        """Token ids: one, a list of several, or none where the key is absent.

        past: an id past the vocabulary, which the model can neither read nor write, is left out
        (a library's default that was never set for a small vocabulary), not a problem; `ids_past`
        has it.
        """
        value = self.take(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        for token_id in listed:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                self._wrong(key, value, "a token id or a list of them")
                return ()
            if token_id < 0 or (token_id >= vocab_size and not past):
                self._wrong(key, token_id, f"an id from 0 to {vocab_size - 1} (vocab_size)")
                return ()
        self.ids_past[key] = tuple(id_ for id_ in listed if id_ >= vocab_size)
        return tuple(dict.fromkeys(id_ for id_ in listed if id_ < vocab_size))

    def section(self, key: str) -> ConfigReader | None:
        """Return a nested object with its own reader, None where absent; `absorb` it when done."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._wrong(key, value, "an object")
            return None
        return ConfigReader(value, where=key)

    def absorb(self, section: ConfigReader) -> None:
        """Take over the problems of a section, its unknown keys among them."""
        section.refuse_unknown()
        self.problems += [f"{section.where}: {problem}" for problem in section.problems]

    def require(self, key: str, allowed: Iterable[Any], reason: str) -> None:
        """Require that the key is absent, null, or one of `allowed`; else note a problem with the
        reason."""
        value = self.take(key)
        fine = any(one == value and type(one) is type(value) for one in allowed)
        if value is not None and not fine:
            self.note(f"{key} is {show(value)}: {reason}")

    def pass_over(self, keys: Iterable[str]) -> None:
        """Keys that cannot change an answer."""
        self._seen.update(keys)

    def pass_over_all(self) -> None:
        """All keys that are left."""
        self._seen.update(self._values)

    def refuse_unknown(self) -> None:
        """Note each key that was not read and is not null."""
        for key in self._values:
            if key not in self._seen and self.has(key):
                self.note(
                    f"unknown key {key!r} (value {show(self._values[key])}): it might change "
                    "answers, so it is not ignored; remove it if it does not matter"
                )

    def finish(self) -> None:
        """Raise ConfigError with all problems, if there are any."""
        self.refuse_unknown()
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ConfigError(f"{self.where} cannot be honoured as written:{lines}")

    def _absent(self, key: str, allowed: str, default: Number | None, fallback: Number) -> Number:
        if default is not None:
            return default
        self.note(f"{key} is missing; {allowed} is needed")
        self._unusable.add(key)
        return fallback

    def _wrong(self, key: str, value: Any, allowed: str) -> None:
        self.note(f"{key} is {show(value)}; {allowed} is allowed")
        self._unusable.add(key)
