"""The vocabulary of a model, read from its tokenizer's files: what grammars are compiled for.

The engine knows ids only; it reads these files when the first grammar comes, in the compiler's
thread. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.groups import ModelConfig
from quire.engine.model_files import model_folder
from quire.structured.vocabulary import Vocabulary


def model_vocabulary(config: ModelConfig, *, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The tokens of a model, read from its files. Raises TokenizerError."""
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_folder(config), vocab_size=vocab_size)
    return Vocabulary(
        token_bytes=[tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=tuple(eos_ids),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
