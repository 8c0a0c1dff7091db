"""Fingerprints: digests of all an answer depends on beside the request, and of all KV depend on.

system_fingerprint, of an answer: every byte of the weights (as the executor digested them), the
files of a model's folder that decide how text becomes tokens and back and what is asked by default
(of a GGUF file: its metadata), the chat template where another than the model's own is in force,
the program that runs with the numerics version, the executor's recipe (instruction set), the degree
of a parallelism that splits sums (`--tp-mode fast`; else tensor parallelism splits outputs only,
and the program is the whole one), the KV dtype and the context length. Two engines with one
fingerprint give one answer. What a server adds (ceilings, parsers of answers) is in
quire/api/server_state.py.

block_fingerprint, of a block of keys and values: what computes them and how they lie. Tokens are
ids, so no tokenizer, template or default is part of it: where only these have changed, blocks are
found again, on disk too.

Whether embeddings are served (--convert embed) is part of neither: no token and no block depends
on it, and an embedding is made of what the program without it computes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.gguf_model import find_gguf
from quire.base.gguf_open import open_gguf
from quire.base.regular_file import read_regular
from quire.program.pooling import without_pooling
from quire.program.program import Program
from quire.program.serialize import digest as program_digest

# Changes with what lies in a block's bytes where the program does not say, and with what the
# digests begin with by which blocks are found.
LAYOUT_VERSION = 2
_MAX_FILE_BYTES = 256 << 20
# Of a model's folder, beside weights: what the config, tokenizer and template readers open.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "*_Pooling/config.json",
)


def system_fingerprint(
    program: Program,
    folder: Path,
    *,
    weights_digest: str,
    recipe: str,
    max_model_len: int,
    parallel_degree: int = 1,
    chat_template: str | None = None,
) -> str:
    """ "fp_" and 16 hexadecimal digits. chat_template: the text of the one that was chosen in place
    of the model's own; None: its own is in force."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (
        weights_digest,
        files_digest(folder),
        program_digest(without_pooling(program)),
        recipe,
        str(max_model_len),
        str(parallel_degree),
        ",".join(cache.precision for cache in program.caches),
    ):
        digest.update(part.encode() + b"\0")
    if chat_template is not None:
        digest.update(b"template\0" + chat_template.encode("utf-8", "surrogatepass"))
    return f"fp_{digest.hexdigest()}"


def block_fingerprint(
    program: Program,
    *,
    executor: str,
    recipe: str,
    weights_digest: str,
    block_size: int,
    block_bytes: int,
) -> bytes:
    """32 bytes over all that a block's bytes depend on beside the tokens before and in it.

    executor, recipe, weights_digest: the executor's own words. The program holds the numerics
    version, the angles of positions (as the served context length settles them) and the KV dtype.
    """
    digest = hashlib.blake2b(digest_size=32)
    for part in (
        str(LAYOUT_VERSION),
        executor,
        recipe,
        weights_digest,
        program_digest(without_pooling(program)),
        str(block_size),
        str(block_bytes),
    ):
        digest.update(part.encode() + b"\0")
    return digest.digest()


def files_digest(folder: Path) -> str:
    """Return a digest of the FILES that exist, and of all bytes before a GGUF file's tensors.

    Raises ConfigError for one that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    if (gguf := find_gguf(folder)) is not None:
        digest.update(open_gguf(gguf).header())
        return digest.hexdigest()
    for pattern in FILES:
        for path in sorted(folder.glob(pattern)):
            try:
                content = read_regular(path, limit_bytes=_MAX_FILE_BYTES)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
