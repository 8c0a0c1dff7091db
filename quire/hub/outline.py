"""Describe a model on the hub without its weights, for `quire plan ORG/NAME`.

    with outline(required_name("ORG/NAME"), report=print) as path:
        ...  # open_model(path) and open_checkpoint(path) read what they would read of the model

Of a GGUF file, and of safetensors that are quantized as their config.json says, only the headers
are requested, by ranges of bytes; they begin sparse files of the true sizes in a temporary
directory, which is removed afterwards. Of other models config.json is enough. It is kept in the
cache, so that the model can be planned again without a connection, and listed as planned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.base.errors import ModelError, WeightsError
from quire.base.gguf_file import GgufFile
from quire.base.gguf_parts import SUFFIX
from quire.base.regular_file import is_present
from quire.hub.cache import PLANNED, planned_snapshot, snapshot_of
from quire.hub.download import Downloads
from quire.hub.files import CONFIG, CONFIGURATION, RemoteFile, first_files
from quire.hub.names import HubName
from quire.hub.pull import point_revision, weight_files
from quire.hub.remote import Revision, read_range, read_revision
from quire.models.config_reader import load_config
from quire.weights.safetensors import MAX_HEADER_BYTES

# The metadata of most GGUF files, vocabulary included, is smaller.
_GGUF_HEADER_BYTES = 8 << 20
_MAX_GGUF_HEADER_BYTES = 256 << 20
_SAFETENSORS_HEADER_BYTES = 256 << 10
_LENGTH = struct.Struct("<Q")


@contextmanager
def outline(name: HubName, *, report: Callable[[str], None]) -> Iterator[Path]:
    """Yield the path of a model that has its configuration and the headers of its weights.

    report: receives lines for the user. Raises ModelError where the hub has no such model. Where
    the hub cannot be asked, the configuration in the cache is used if it is there.
    """
    try:
        revision = read_revision(name)
    except ModelError as error:
        if (snapshot := _configuration_in_cache(name)) is None:
            raise
        report(f"{error}. Planned from {snapshot / CONFIG}")
        yield snapshot
        return
    with TemporaryDirectory(prefix="quire-plan-") as folder:
        yield _outline(name, revision, Path(folder), report)


def _configuration_in_cache(name: HubName) -> Path | None:
    snapshot = None if name.file else snapshot_of(name) or planned_snapshot(name)
    return snapshot if snapshot is not None and (snapshot / CONFIG).is_file() else None


def _outline(
    name: HubName, revision: Revision, folder: Path, report: Callable[[str], None]
) -> Path:
    first = first_files(revision.files, name)
    if first[0].path.endswith(SUFFIX):
        paths = [_gguf(name, revision, file, folder) for file in first]
        return paths[0]
    snapshot = _configuration(name, revision, first, report)
    if "quantization_config" not in load_config(snapshot / CONFIG):
        return snapshot
    for file in first:
        if file.path in CONFIGURATION:
            (folder / file.path).write_bytes((snapshot / file.path).read_bytes())
    for file in weight_files(name, revision, snapshot):
        _safetensors(name, revision, file, folder)
    return folder


def _configuration(
    name: HubName,
    revision: Revision,
    files: Sequence[RemoteFile],
    report: Callable[[str], None],
) -> Path:
    """Download the files that describe a model of safetensors; return their snapshot."""
    downloads = Downloads(name, revision, report)
    for file in files:
        if file.path in CONFIGURATION and not downloads.is_there(file):
            downloads.fetch(file, lambda num_bytes: None)
    if snapshot_of(name) is None:  # one that is there may be complete, and stays the revision's
        point_revision(name, revision, refs=PLANNED)
    return downloads.snapshot


def _gguf(name: HubName, revision: Revision, file: RemoteFile, folder: Path) -> Path:
    """Write the header of a GGUF file. Its length shows only while it is parsed."""
    path = folder / file.path.rpartition("/")[2]
    read = partial(read_range, name, revision, file)
    start, limit = 0, min(file.num_bytes, _MAX_GGUF_HEADER_BYTES)
    end = min(_GGUF_HEADER_BYTES, limit)
    while True:
        _write(name, path, file.num_bytes, start, read(start, end))
        try:
            header_bytes = GgufFile(path).header_bytes
        except WeightsError as error:
            if end == limit:
                shown = str(error).replace(str(path), f"{name.repo}:{file.path}")
                raise ModelError(shown) from error
            header_bytes = file.num_bytes
        if header_bytes <= end or end == limit:
            return path
        start, end = end, min(2 * end, limit)


def _safetensors(name: HubName, revision: Revision, file: RemoteFile, folder: Path) -> None:
    """Write the header of a safetensors file, which begins with its length."""
    path = folder / file.path
    read = partial(read_range, name, revision, file)
    begin = read(0, min(_SAFETENSORS_HEADER_BYTES, file.num_bytes))
    _write(name, path, file.num_bytes, 0, begin)
    end = 0
    if len(begin) >= _LENGTH.size:
        end = min(_LENGTH.size + _LENGTH.unpack_from(begin)[0], file.num_bytes)
    if len(begin) < end <= MAX_HEADER_BYTES:
        _write(name, path, file.num_bytes, len(begin), read(len(begin), end))


def _write(name: HubName, path: Path, num_bytes: int, start: int, content: bytes) -> None:
    """Write bytes into a sparse file of `num_bytes`, which is created if it is not there."""
    try:
        with path.open("r+b" if is_present(path) else "w+b") as file:
            file.truncate(num_bytes)
            file.seek(start)
            file.write(content)
    except OSError as error:
        raise ModelError(
            f"{name}: a sparse file of {num_bytes} bytes cannot be written as {path} "
            f"({error.strerror}); set TMPDIR to a directory on another disk"
        ) from error
