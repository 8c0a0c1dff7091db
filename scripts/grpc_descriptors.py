"""Write what protoc reads from the .proto files of the gRPC services.

    python scripts/grpc_descriptors.py            # print whether the file is up to date
    python scripts/grpc_descriptors.py --write

Needs grpcio-tools, which neither the package nor its build needs: the result is committed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "quire" / "api" / "rpc" / "protos"
NAMES = ("quire_v1.proto", "kserve_v2.proto", "health_v1.proto")


def descriptors() -> bytes:
    """Return the serialized descriptors of all files, without comments."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        arguments = ["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", *NAMES]
        if protoc.main(arguments):
            raise SystemExit("protoc refuses the files")
        return out.read_bytes()


def main() -> None:
    """See the top of this file."""
    path, found = FOLDER / "descriptors.binpb", descriptors()
    if "--write" in sys.argv[1:]:
        path.write_bytes(found)
    elif found != path.read_bytes():
        raise SystemExit(f"{path} is out of date; run this script with --write")


if __name__ == "__main__":
    main()
