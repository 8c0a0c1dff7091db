"""Paths of the environments, builds and converted checkpoints of the other engines.

The directory QUIRE_PEERS, else `.peers` in the repository (ignored by git). Standard library only:
the installer and every driver import this with their own Python.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def peers_folder() -> Path:
    """Return the directory of all peers; it may not exist yet."""
    return Path(os.environ.get("QUIRE_PEERS") or REPOSITORY / ".peers")


def environment_python(name: str) -> Path:
    """Return a peer's interpreter: "openvino", "vllm", "transformers", "smg", "export"."""
    return peers_folder() / name / "env" / "bin" / "python"


def llama_source() -> Path:
    """Return llama.cpp's source in the sdist of llama-cpp-python."""
    return peers_folder() / "llama.cpp" / "source" / "vendor" / "llama.cpp"


def llama_tool(name: str) -> Path:
    """Return one of llama.cpp's programs: "llama-server", "llama-bench", "llama-quantize"."""
    return peers_folder() / "llama.cpp" / "build" / "bin" / name


def is_installed(name: str) -> bool:
    """Return whether `bench/peers/setup NAME` completed with the current versions."""
    return (peers_folder() / name / "installed.json").is_file()
