"""Open the store of responses that a server's settings ask for.

SQLite is imported only if a file is named or API processes share one.
"""

from __future__ import annotations

from quire.api.openai.responses.store import MemoryStore, ResponseStore
from quire.config.server_config import ServerConfig


def store_of(config: ServerConfig, shared: str | None = None) -> ResponseStore:
    """Return the store of a server: in its file, else in `shared`, else in memory.

    shared: a file of all API processes. Raises SettingError.
    """
    path, max_bytes = config.responses_store or shared, config.responses_store_bytes
    if path is None or max_bytes == 0:
        return MemoryStore(max_bytes)
    from quire.api.openai.responses.sqlite_store import SqliteStore  # only if it is used

    return SqliteStore(path, max_bytes)
