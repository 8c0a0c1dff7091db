"""Settings of the KV store that several engines share.

Only single values are checked here; the directory, the key file and the master are looked at when
the engine starts, in the process that uses them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from quire.base.errors import SettingError
from quire.config.key_file import how_to_make_key
from quire.config.settings import at_least, one_of, setting

MOONCAKE = "mooncakestore://"
FILE = "file://"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreConfig:
    """KV store shared by several engines."""

    kv_store: str | None = setting(
        None,
        "store of KV blocks that several engines share: a directory on a file system that all of "
        "them mount, or mooncakestore://HOST:PORT of a Mooncake master (quire-llm[mooncake]); "
        "default: none",
    )
    kv_store_bytes: int = setting(
        16 * 1024**3,
        "of a directory, about how large it may become, whichever engine writes; of Mooncake, the "
        "memory that this engine contributes, as in 64GiB",
        flag="kv-store-size",
    )
    kv_store_buffer_bytes: int = setting(
        1024**3,
        "host memory of the buffer for blocks to and from the store, as in 2GiB; a prefix that "
        "does not fit is computed from where it ends",
        flag="kv-store-buffer-size",
    )
    kv_store_fetch: Literal["cost", "always", "never"] = setting(
        "cost",
        "when to fetch blocks from the store: cost, if it is predicted to be faster than computing "
        "them; always; never, the store is only filled",
    )
    kv_store_timeout_s: float = setting(
        2.0,
        "seconds after which a call to the store counts as failed; a request never waits longer "
        "for the next blocks, and seldom longer than computing them would take",
        flag="kv-store-timeout",
    )
    kv_store_encoding: Literal["none", "int8"] = setting(
        "none",
        "how blocks travel: none, as they are; int8, the keys and values of a bf16 cache in 8 bits "
        "with a scale for each group, half the bytes: answers then depend on what was fetched",
    )
    kv_store_key_file: str | None = setting(
        None,
        "key that all engines of a Mooncake store have, by which they find and check blocks: a "
        "file that only its owner can read, with at least 16 random bytes (a directory has one)",
    )
    kv_store_host: str = setting(
        "127.0.0.1",
        "with Mooncake, address at which other engines reach the memory of this one",
    )

    def __post_init__(self) -> None:
        one_of("kv_store_fetch", self.kv_store_fetch, ("cost", "always", "never"))
        one_of("kv_store_encoding", self.kv_store_encoding, ("none", "int8"))
        at_least("kv_store_bytes", self.kv_store_bytes, 1)
        at_least("kv_store_buffer_bytes", self.kv_store_buffer_bytes, 1)
        at_least("kv_store_timeout_s", self.kv_store_timeout_s, 0.01)
        if self.kv_store is None:
            self._check_off()
            return
        place = store_place(self.kv_store)
        if place.port and self.kv_store_key_file is None:
            raise SettingError(
                f"kv_store is {self.kv_store} and kv_store_key_file is not given: Mooncake asks "
                "for no password, so that blocks are found and checked by a key that the engines "
                f"share; {how_to_make_key('kv-store.key')}"
            )
        if not place.port:
            for name, value, unset in (
                ("kv_store_key_file", self.kv_store_key_file, None),
                ("kv_store_host", self.kv_store_host, "127.0.0.1"),
            ):
                if value != unset:
                    raise SettingError(
                        f"{name} is {value} and kv_store is a directory, which keeps its own key "
                        "and is reached by no address; leave it out"
                    )

    @property
    def is_on(self) -> bool:
        """Return whether there is a store."""
        return self.kv_store is not None

    def _check_off(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given:
            raise SettingError(
                f"{given[0]} is {getattr(self, given[0])}, and there is no shared KV store; add "
                "kv_store, or leave it out"
            )


class StorePlace(NamedTuple):
    """Where a store is: a directory, or host and port of a master (port 0: a directory)."""

    directory: str = ""
    host: str = ""
    port: int = 0


def store_place(text: str) -> StorePlace:
    """Return where a store is. Raises SettingError."""
    if text.startswith(FILE):
        rest = text.removeprefix(FILE)
        if rest.startswith("/"):
            return StorePlace(directory=rest)
    elif text.startswith(MOONCAKE):
        address = text.removeprefix(MOONCAKE).removesuffix("/")
        host, _, port = address.rpartition(":")
        if re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", host) and re.fullmatch(r"\d{1,5}", port):
            number = int(port)
            if 0 < number <= 65535:
                return StorePlace(host=host, port=number)
    elif text and "://" not in text:
        return StorePlace(directory=text)
    raise SettingError(
        f"kv_store is {text!r}; a directory (/shared/kv, or file:///shared/kv) or the address of a "
        "Mooncake master (mooncakestore://10.0.0.7:50051) is expected"
    )
