"""Which tokens begin and end a text, and what is asked of sampling, as a GGUF file says it.

Beside eos, files have an end of turn (eot) and of message (eom); older ones name neither, so tokens
that are special and spelled like one count too, as in llama.cpp. Knows no tokenizer beyond that.
Source: llama-vocab.cpp and gguf-py's constants (ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.gguf_file import GgufArray
from quire.models.config_reader import ConfigReader
from quire.models.gguf_values import plain_values

TOKENIZER = "tokenizer.ggml."
SAMPLING = "general.sampling."
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
# What a file may ask of sampling that is not here, and the values that mean "not used".
SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "penalty_last_n": (),
    "sequence": (),
    "xtc_probability": (0.0,),
}


def read_ends(config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text, the file's own eos first; problems are noted.

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


def read_sampling(metadata: Mapping[str, Any], where: str) -> dict[str, float | int]:
    """What a request that leaves it open gets, by SamplingParams' names. Raises ConfigError."""
    config = ConfigReader(plain_values(metadata, SAMPLING), where=f"{where}: {SAMPLING}*")
    defaults: dict[str, float | int] = {}
    for key, name, low, high in (
        ("temp", "temperature", 0.0, 100.0),
        ("top_p", "top_p", 1e-9, 1.0),
        ("min_p", "min_p", 0.0, 1.0),
        ("penalty_repeat", "repetition_penalty", 0.01, 100.0),
    ):
        if config.has(key):
            defaults[name] = config.number(key, low, high)
    if config.has("top_k"):
        defaults["top_k"] = config.whole("top_k", 0, 2**31 - 1)
    for key, allowed in SWITCHED_OFF.items():
        config.require(key, allowed, "this way of choosing tokens cannot be a model's default")
    if config.take("mirostat") in (None, 0):
        config.pass_over(["mirostat_tau", "mirostat_eta", "xtc_threshold"])
    config.finish()
    return defaults
