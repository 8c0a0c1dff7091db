"""Where the environments, builds and converted checkpoints of the other engines lie.

The folder that QUIRE_PEERS names, else `.peers` beside this repository's files (git ignores it).
Standard library only: the installer and every driver import this with whatever Python they have.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def peers_folder() -> Path:
    """The folder of all that belongs to the peers; it may not exist yet."""
    return Path(os.environ.get("QUIRE_PEERS") or REPOSITORY / ".peers")


def environment_python(name: str) -> Path:
    """The interpreter of a peer's environment: "openvino", "vllm", "transformers", "export"."""
    return peers_folder() / name / "env" / "bin" / "python"


def llama_source() -> Path:
    """llama.cpp's source as the sdist of llama-cpp-python brings it."""
    return peers_folder() / "llama.cpp" / "source" / "vendor" / "llama.cpp"


def llama_tool(name: str) -> Path:
    """A program of llama.cpp's own: "llama-server", "llama-bench", "llama-quantize"."""
    return peers_folder() / "llama.cpp" / "build" / "bin" / name


def is_installed(name: str) -> bool:
    """Whether `bench/peers/setup NAME` ran to its end, with the versions it would take now."""
    return (peers_folder() / name / "installed.json").is_file()
