"""Choose the files of a repository that Quire needs, from their names and sizes.

Safetensors models need the configuration, the tokenizer, chat templates, the files that say how
embeddings are made, and the shards their index names; GGUF models need one file, or all parts of a
split one. Pickles, other frameworks' weights and copies in subdirectories are never chosen. Pure:
reads no file and no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.base.errors import ModelError
from quire.base.gguf_parts import parts_of
from quire.hub.gguf_choice import TEMPLATES, chosen_gguf, gguf_models, size_text
from quire.hub.names import HubName, is_safe_path
from quire.weights.checkpoint import (
    HEADS_FILE,
    INDEX_FILE,
    MAX_INDEX_BYTES,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
)

MAX_LISTED_FILES = 100_000
_MAX_NAMED = 12
# All that models, weights and text read in a directory, besides weights.
CONFIG = "config.json"
# Files that describe the model: whether it can be loaded, and from which files.
CONFIGURATION = (CONFIG, "generation_config.json", INDEX_FILE)
_SMALL = (CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "chat_template.json", "chat_template.jinja", "modules.json",
          "config_sentence_transformers.json", "sentence_bert_config.json")  # fmt: skip
# Of embedding models: what quire/models/pooling_files.py reads beside these.
_POOLING = re.compile(r"\d{1,3}_Pooling/config\.json")
# In the order in which quire.text.sources looks for a tokenizer; the first that is there is used.
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("*.tiktoken",),
               ("vocab.json", "merges.txt"))  # fmt: skip
MAX_SMALL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository.

    digest: hexadecimal, of its content: SHA-256 if `is_large`, else SHA-1 as git computes it. It
    is the name of the file's blob in the cache.
    """

    path: str
    num_bytes: int
    digest: str
    is_large: bool


Listing = Mapping[str, RemoteFile]


def check_listing(name: HubName, files: Iterable[RemoteFile]) -> dict[str, RemoteFile]:
    """Return files by path. Raises ModelError for paths that leave a directory, or too many."""
    listing: dict[str, RemoteFile] = {}
    for file in files:
        if not is_safe_path(file.path):
            raise ModelError(
                f"{name.repo}: the repository lists a file {file.path[:80]!r}; a relative path "
                "without .. is needed; nothing was downloaded"
            )
        listing[file.path] = file
        if len(listing) > MAX_LISTED_FILES:
            raise ModelError(f"{name.repo}: the repository has over {MAX_LISTED_FILES} files")
    return listing


def first_files(listing: Listing, name: HubName) -> list[RemoteFile]:
    """Return the files to read first: all of a GGUF model, else all but the shards.

    Raises ModelError where there is nothing to load, or several GGUF files to choose from.
    """
    if name.file:
        return gguf_files(listing, name)
    has_weights = not {SINGLE_FILE, INDEX_FILE, HEADS_FILE}.isdisjoint(listing)
    if CONFIG in listing and has_weights:
        return _small_files(listing, name)
    if gguf_models(_sizes(listing)):
        return gguf_files(listing, name)
    raise ModelError(f"{name.repo}: {_why_nothing(listing)}")


def shards(listing: Listing, name: HubName, weight_map: Mapping[str, str]) -> list[RemoteFile]:
    """Return the shards that the index names. Raises ModelError for those not in the repository."""
    wanted = sorted(set(weight_map.values()))
    missing = [shard for shard in wanted if shard not in listing]
    if missing:
        raise ModelError(
            f"{name.repo}: {INDEX_FILE} names {len(wanted)} shards, of which {len(missing)} are "
            f"not in the repository ({_listed(missing)}); take another revision or repository"
        )
    return [listing[shard] for shard in wanted]


def gguf_files(listing: Listing, name: HubName) -> list[RemoteFile]:
    """Return the files of the GGUF model that `name.file` selects, or of the only one."""
    models = gguf_models(_sizes(listing))
    first = chosen_gguf(models, name)
    missing = [part for part in parts_of(first) if part not in listing]
    if missing:
        raise ModelError(
            f"{name.repo}: {first} is split, and {_listed(missing)} is not in the repository; "
            "take another file"
        )
    return [listing[part] for part in parts_of(first)]


def _sizes(listing: Listing) -> dict[str, int]:
    return {path: file.num_bytes for path, file in listing.items()}


def _small_files(listing: Listing, name: HubName) -> list[RemoteFile]:
    found = [path for path in _SMALL if path in listing]
    found += sorted(
        path
        for path in listing
        if path.startswith(f"{TEMPLATES}/") and path.endswith(".jinja") and path.count("/") == 1
    )
    found += sorted(path for path in listing if _POOLING.fullmatch(path))
    for kinds in _TOKENIZERS:
        group = [path for kind in kinds for path in _matching(listing, kind)]
        if len(group) >= len(kinds):
            found += group
            break
    if SINGLE_FILE not in listing and INDEX_FILE in listing:
        found.append(INDEX_FILE)
    for path in found:
        limit = MAX_INDEX_BYTES if path == INDEX_FILE else MAX_SMALL_BYTES
        if listing[path].num_bytes > limit:
            raise ModelError(
                f"{name.repo}: {path} has {size_text(listing[path].num_bytes)}; at most "
                f"{size_text(limit)} are allowed"
            )
    return [listing[path] for path in found]


def _matching(listing: Listing, kind: str) -> list[str]:
    if not kind.startswith("*"):
        return [kind] if kind in listing else []
    return sorted(path for path in listing if path.endswith(kind[1:]) and "/" not in path)


def _why_nothing(listing: Listing) -> str:
    pickles = sorted(path for path in listing if path.endswith(PICKLE_SUFFIXES))
    if "adapter_config.json" in listing:
        return (
            "it is an adapter (adapter_config.json), not a model; merge it into its base model "
            "with peft, and give that directory"
        )
    if "model_index.json" in listing:
        return "it is a pipeline that makes images (model_index.json); only text models run"
    if pickles:
        return (
            f"its weights are pickles only ({_listed(pickles)}), which can run any code when they "
            "are loaded; take a repository with safetensors or GGUF files of the same model (those "
            "of draft heads can be converted: docs/speculation.md#draft-heads)"
        )
    if not listing:
        return "the repository is empty"
    return (
        f"it has neither {CONFIG} with {SINGLE_FILE} (or {INDEX_FILE}) nor a GGUF file, but "
        f"{_listed(sorted(listing))}; name a repository with one of these, or another revision "
        "(ORG/NAME@REVISION)"
    )


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(paths[:_MAX_NAMED]) + more
