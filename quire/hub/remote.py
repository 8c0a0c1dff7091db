"""List and download files of the Hugging Face Hub, and explain what goes wrong.

`huggingface_hub` does the work and reads HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_CACHE,
HF_HUB_OFFLINE and the proxies' variables itself. Only this module imports its network functions,
and only commands of a user reach it: no request and no file of a model does. Code in a repository
is never run.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from quire.base.errors import ModelError
from quire.base.show import show
from quire.hub.cache import COMMIT
from quire.hub.files import Listing, RemoteFile, check_listing
from quire.hub.names import HubName

_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR),
)
_NOT_SATISFIABLE = 416  # a range behind the end
_PARTIAL_CONTENT, _NOT_FOUND, _TOO_MANY = 206, 404, 429
_TOO_MANY_REDIRECTS = "TooManyRedirects"  # of the HTTP client, by name: it is not imported here
MAX_HTTP_BYTES = constants.MAX_HTTP_DOWNLOAD_SIZE
_MAX_NEAR = 5
_MAX_REASON_CHARS = 300
# Of the HTTP client that huggingface_hub uses: connections, timeouts, proxies, broken transfers.
_TransportError: type[Exception] = getattr(errors, "HTTPError", OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The commit that a revision stands for now, and its files by path."""

    commit: str
    files: Listing


def read_revision(name: HubName) -> Revision:
    """Ask the hub for the files of a revision. Raises ModelError with what to do."""
    with _explained(name):
        found = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    commit = found.sha or ""
    if not COMMIT.fullmatch(commit):
        raise ModelError(f"{name}: {constants.ENDPOINT} names no commit but {show(found.sha)}")
    files = [_remote_file(name, sibling) for sibling in found.siblings or ()]
    return Revision(commit=commit, files=check_listing(name, files))


def receive(
    name: HubName,
    revision: Revision,
    file: RemoteFile,
    partial: Path,
    on_bytes: Callable[[int], None],
) -> None:
    """Receive the bytes of a file that `partial` lacks, and append them.

    A broken connection is resumed where it broke. on_bytes: called with the number of bytes of each
    part received; negative where some are received again. Raises ModelError; what was received is
    kept where it can be resumed.
    """
    start = partial.stat().st_size if partial.exists() else 0
    counter = cast(Any, _byte_counter(on_bytes, start))
    with _explained(name):
        if file.num_bytes > MAX_HTTP_BYTES:
            # The hub sends files as large only by its own protocol, which does not resume.
            _receive_whole(name, revision, file, partial, counter)
            return
        try:
            with partial.open("ab") as content:
                http_get(
                    hf_hub_url(name.repo, file.path, revision=revision.commit),
                    content,
                    resume_size=start,
                    # Offsets are those of the file, not of a compressed transfer.
                    headers={**build_hf_headers(), "Accept-Encoding": "identity"},
                    expected_size=file.num_bytes,
                    tqdm_class=counter,
                )
        except errors.HfHubHTTPError as error:
            if error.response is not None and error.response.status_code == _NOT_SATISFIABLE:
                partial.unlink()  # the hub has less than it listed when the file began
            raise
        except OSError as error:
            if partial.stat().st_size > file.num_bytes and not isinstance(error, _TransportError):
                partial.unlink()  # a shorter one is kept: a proxy may have ended the transfer early
            raise


def read_range(name: HubName, revision: Revision, file: RemoteFile, start: int, end: int) -> bytes:
    """Return the bytes of a file from `start` to `end`, fewer where it ends. Raises ModelError."""
    url = hf_hub_url(name.repo, file.path, revision=revision.commit)
    range_of = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    content = bytearray()
    with (
        _explained(name),
        http_stream_backoff(
            "GET",
            url,
            headers={**build_hf_headers(), **range_of},
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response,
    ):
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == _PARTIAL_CONTENT else start
        for part in response.iter_bytes():
            content += part
            if len(content) >= skipped + end - start:
                break
    return bytes(content[skipped : skipped + end - start])


def _receive_whole(
    name: HubName, revision: Revision, file: RemoteFile, partial: Path, counter: Any
) -> None:
    # The lock of the blob covers this directory too; a killed download may have left it.
    folder = partial.with_name(f"{partial.name}.d")
    if folder.exists():
        shutil.rmtree(folder)
    try:
        got = hf_hub_download(
            name.repo, file.path, revision=revision.commit, local_dir=folder, tqdm_class=counter
        )
        Path(got).replace(partial)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remote_file(name: HubName, sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    size, digest = (sibling.size, sibling.blob_id) if lfs is None else (lfs.size, lfs.sha256)
    length = 40 if lfs is None else 64
    is_digest = isinstance(digest, str) and len(digest) == length and digest.isalnum()
    if not isinstance(size, int) or size < 0 or not is_digest:
        raise ModelError(
            f"{name.repo}: {constants.ENDPOINT} lists {show(sibling.rfilename)} with size "
            f"{show(size)} and digest {show(digest)}; a size and a digest of {length} digits are "
            "needed. If HF_ENDPOINT is set, it must be the address of a hub"
        )
    return RemoteFile(
        path=str(sibling.rfilename), num_bytes=size, digest=digest, is_large=lfs is not None
    )


def _byte_counter(on_bytes: Callable[[int], None], resumed_bytes: int) -> type:
    """Return what huggingface_hub uses as a progress bar; it shows nothing.

    resumed_bytes: not counted, unless they are received again.
    """

    class ByteCounter:
        def __init__(self, **settings: Any) -> None:
            self.n, self.total = 0, settings.get("total")
            if repeated := resumed_bytes - int(settings.get("initial") or 0):
                on_bytes(-repeated)

        def update(self, num_bytes: float | None = 1) -> None:
            on_bytes(int(num_bytes or 0))

        def update_transfer(self, num_bytes: float | None = 1) -> None:
            """Ignore bytes of the network, which `update` counts when they are written."""

        def __enter__(self) -> ByteCounter:
            return self

        def __exit__(self, *raised: object) -> None:
            self.close()

        def close(self) -> None: ...

        def refresh(self) -> None: ...

        def set_postfix_str(self, text: str, refresh: bool = False) -> None: ...

        def set_transfer_postfix_str(self, text: str, refresh: bool = False) -> None: ...

        def set_description_str(self, text: str) -> None: ...

    return ByteCounter


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn errors of huggingface_hub into a ModelError that names the action."""
    try:
        yield
    except (
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        errors.XetDownloadError,
        _TransportError,
        ValueError,
        OSError,
    ) as error:
        raise ModelError(_reason(name, error)) from error


def _reason(name: HubName, error: BaseException) -> str:
    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{name.repo}"
    if not hub.startswith(("http://", "https://")):
        return (
            f"{name}: HF_ENDPOINT is {show(hub)}; an address with http:// or https:// is allowed, "
            "as in https://huggingface.co; correct it, or unset it"
        )
    chain = _causes(error)
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
            return (
                f"{name}: the cache {constants.HF_HUB_CACHE} cannot be written ({cause.strerror}); "
                "make room, or set HF_HOME to a directory that you may write to"
            )
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return (
                f"{name}: HF_HUB_OFFLINE is set (TRANSFORMERS_OFFLINE counts too), so nothing can "
                "be downloaded; unset it, or copy the model into the cache"
            )
        if isinstance(cause, errors.GatedRepoError):
            return f"{name} is gated: accept its licence at {page}; then {_how_to_sign_in()}"
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"{name.repo} has no revision {name.revision}; {page}/commits lists them"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"there is no model {name.repo} at {hub}, or it is private{_near(name)}; check "
                f"the name, or {_how_to_sign_in()}"
            )
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            return (
                f"{name}: access is denied (HTTP {status}); {_how_to_sign_in()}, with a token that "
                f"may read {page}"
            )
        if status == _TOO_MANY:
            return (
                f"{name}: {hub} answered with HTTP 429: too many requests; wait some minutes, or "
                "sign in with `hf auth login` for a higher limit; what was received is kept"
            )
        if status is not None and status >= 500:
            return (
                f"{name}: {hub} answered with HTTP {status} (a fault of the hub); repeat the "
                "command later: what was received is kept"
            )
        if status == _NOT_FOUND:  # a hub says in a header what it does not find
            return (
                f"{name}: {hub} answered with HTTP 404 as no hub does; check HF_ENDPOINT and "
                "HTTPS_PROXY, or unset them"
            )
        if status is not None:
            return f"{name}: {hub} answered with HTTP {status} ({_short(cause)}); try again later"
        if type(cause).__name__ == _TOO_MANY_REDIRECTS:
            return (
                f"{name}: {hub} answers with redirects that never end; check HF_ENDPOINT and "
                "HTTPS_PROXY"
            )
    return (
        f"{name}: the download from {hub} failed ({_short(chain[-1])}); check the network, "
        "HTTPS_PROXY and HF_ENDPOINT, then repeat the command: what was received is kept"
    )


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and len(chain) < 10:
        chain.append(now)
        now = now.__cause__
    return chain


def _how_to_sign_in() -> str:
    if get_token():
        return "use another token (HF_TOKEN, or `hf auth login`): the present one may not read it"
    return "sign in with `hf auth login`, or set HF_TOKEN to a token of an account that may read it"


def _near(name: HubName) -> str:
    """Return models of similar names, as the hub finds them."""
    own = name.repo.rpartition("/")[2]
    try:
        found = [model.id for model in HfApi().list_models(search=own, limit=_MAX_NEAR)]
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, _TransportError, ValueError):
        return ""  # a suggestion only: the error is reported without it
    return f" (similar: {', '.join(str(near)[:100] for near in found)})" if found else ""


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_MAX_REASON_CHARS]
