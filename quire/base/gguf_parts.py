"""File names of GGUF models: the parts of a split model, and files that hold no text model.

A split model's files are named NAME-00001-of-0000N.gguf. Knows names only.
"""

from __future__ import annotations

import re

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# The part of a model that sees pictures lies in a file of its own beside the one that writes.
_BESIDE = "mmproj"


def is_beside(file_name: str) -> bool:
    """Return whether a GGUF file holds the part of a model that sees pictures."""
    return file_name.startswith(_BESIDE)


def first_part_of(path: str) -> str:
    """Return the path of a split model's first file, from any of them; else the path."""
    part = PART.fullmatch(path)
    return f"{part['stem']}-00001-of-{part['count']}{SUFFIX}" if part else path


def parts_of(path: str) -> list[str]:
    """Return the paths of all files of a split model, from any of them; else the path itself."""
    part = PART.fullmatch(path)
    if part is None:
        return [path]
    numbers = range(1, max(int(part["count"]), 1) + 1)
    return [f"{part['stem']}-{number:05d}-of-{part['count']}{SUFFIX}" for number in numbers]
