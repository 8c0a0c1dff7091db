"""Message classes of the .proto files in protos, made when this module is imported.

`descriptors.binpb` is what protoc reads from the .proto files (scripts/grpc_descriptors.py writes
it; a test compares). Modules that protoc generates would tie this package to few versions of
protobuf, and would register their names for the whole process, where other packages have the same:
these classes are in a pool of their own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClassesForFiles

FOLDER = Path(__file__).parent / "protos"


def _classes_of(files: Any, name: str) -> Any:
    """Return the message classes of one file, by their names."""
    pool = DescriptorPool()
    for file in files:
        if file.name == name:
            pool.Add(file)
    found = GetMessageClassesForFiles([name], pool)
    package = pool.FindFileByName(name).package
    return SimpleNamespace(
        **{full[len(package) + 1 :]: kind for full, kind in found.items()},
    )


_FILES = FileDescriptorSet.FromString((FOLDER / "descriptors.binpb").read_bytes()).file
quire_v1 = _classes_of(_FILES, "quire_v1.proto")
kserve_v2 = _classes_of(_FILES, "kserve_v2.proto")
health_v1 = _classes_of(_FILES, "health_v1.proto")
