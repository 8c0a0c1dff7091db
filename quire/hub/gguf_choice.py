"""Choose one of several GGUF models of a repository, by file name or by quantization.

    models = gguf_models({"a-Q4_K_M.gguf": 900, "a-Q8_0.gguf": 1700})
    chosen_gguf(models, HubName(repo="ORG/a", file="Q8_0"))      # a-Q8_0.gguf

The files of a split model count as one model, called by its first file.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.base.errors import ModelError
from quire.base.gguf_parts import SUFFIX, first_part_of, is_beside
from quire.hub.names import HubName

TEMPLATES = "additional_chat_templates"
_MAX_CHOICES = 40
_ENDS = (SUFFIX, "-0")  # a split model's parts end in -00001-of-00003.gguf


def gguf_models(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the GGUF models among files by their first file, with the bytes of all parts.

    sizes: bytes of files by path.
    """
    found: dict[str, int] = {}
    for path in sorted(sizes):
        if path.endswith(SUFFIX) and not is_beside(path.rpartition("/")[2]):
            first = first_part_of(path)
            found[first] = found.get(first, 0) + sizes[path]
    return found


def matching_gguf(models: Mapping[str, int], name: HubName) -> list[str]:
    """Return the models that `name.file` selects, by path or quantization; all if it is empty."""
    if not name.file:
        return list(models)
    named = first_part_of(name.file)
    if named in models:
        return [named]
    wanted = name.file.lower()
    return [
        path
        for path in models
        if any(f"{mark}{wanted}{end}" in f"/{path.lower()}" for mark in "-._/" for end in _ENDS)
    ]


def chosen_gguf(models: Mapping[str, int], name: HubName) -> str:
    """Return the one model that `name.file` selects.

    models: sizes by first file. Raises ModelError listing them where none or several match.
    """
    found = matching_gguf(models, name)
    if len(found) == 1:
        return found[0]
    problem = f"there is no GGUF file {name.file}"
    if found:
        models = {path: models[path] for path in found}
        problem = f"several files are {name.file}" if name.file else "there are several GGUF files"
    choices = sorted(models.items(), key=lambda model: (model[1], model[0]))
    shown = choices[:_MAX_CHOICES]
    lines = [f"\n  {size_text(size):>10}  {name.repo}:{path}" for path, size in shown]
    lines += [f"\n  and {len(choices) - _MAX_CHOICES} more"] if len(choices) > _MAX_CHOICES else []
    there = "; name one of:" + "".join(lines) if lines else "; there is none at all"
    raise ModelError(f"{name.repo}: {problem}{there}")


def size_text(num_bytes: int) -> str:
    """Format bytes with three digits or so: "817 MiB", "1.5 GiB"."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            digits = 0 if unit == "bytes" or size >= 99.95 else 1
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
