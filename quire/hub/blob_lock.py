"""Lock a blob of the Hugging Face cache, with the lock that `huggingface_hub` takes as well.

.locks/models--ORG--NAME/DIGEST.lock
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from quire.hub.cache import cache_dir

__all__ = ["Timeout", "blob_lock"]


@contextmanager
def blob_lock(blob: Path, *, timeout_s: float | None = None) -> Iterator[None]:
    """Lock a blob, or the part of it that was received: blobs/DIGEST or blobs/DIGEST.incomplete.

    timeout_s: None to wait. Raises Timeout if another process still has the lock then.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # slow import

    digest, repository = blob.name.partition(".")[0], blob.parents[1].name
    lock = cache_dir() / ".locks" / repository / f"{digest}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock, timeout=timeout_s):
        yield
