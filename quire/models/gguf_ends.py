"""Which tokens begin and end a text, as a GGUF file says it.

Beside eos, files have an end of turn (eot) and of message (eom); older ones name neither, so tokens
that are special and spelled like one count too, as in llama.cpp. Knows no tokenizer beyond that.
Source: llama-vocab.cpp and gguf-py's constants (ggml-org/llama.cpp).
"""

from __future__ import annotations

from quire.base.gguf_file import GgufArray
from quire.models.config_reader import ConfigReader

TOKENIZER = "tokenizer.ggml."
CONTROL = 3  # tokenizer.ggml.token_type of tokens that are no text
ENDS = frozenset(
    {
        b"<|eot_id|>",
        b"<|eom_id|>",
        b"<|im_end|>",
        b"<|end|>",
        b"<|endoftext|>",
        b"<|end_of_text|>",
        b"<end_of_turn>",
        b"<EOT>",
    }
)


def read_ends(config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text, the file's own eos first; problems are noted.

    config: the entries behind `tokenizer.ggml.`, arrays as they are.
    """
    named = [
        id_ for role in ("eos", "eot", "eom") for id_ in config.ids(f"{role}_token_id", vocab_size)
    ]
    tokens, kinds = config.take("tokens"), config.take("token_type")
    if isinstance(tokens, GgufArray) and isinstance(kinds, GgufArray):
        marked = kinds.numbers() == CONTROL
        if marked.any() and tokens.count == kinds.count <= vocab_size:
            texts = tokens.texts()
            named += [int(id_) for id_ in marked.nonzero()[0] if texts[id_] in ENDS]
    return tuple(dict.fromkeys(named))
