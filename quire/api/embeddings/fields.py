"""The request fields of /v1/embeddings, /pooling, /v1/score and /v1/rerank.

Knows names and allowed words only. Always holds: no field of sampling is among them, since nothing
is generated.
"""

from __future__ import annotations

_EVERYWHERE = frozenset(
    {
        "model",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "cache_salt",
        "priority",
        "deadline_ms",
    }
)
EMBEDDINGS = _EVERYWHERE | {"input", "encoding_format", "dimensions", "normalize", "prompt_name"}
POOLING = EMBEDDINGS | {"task"}
_PAIRS = _EVERYWHERE | {"instruction"}
SCORE = _PAIRS | {"text_1", "text_2"}
RERANK = _PAIRS | {"query", "documents", "top_n", "return_documents"}

ENCODINGS = ("float", "base64")
SIDES = ("right", "left")
# What vLLM's /pooling may be asked for; only one vector a text is returned here.
TASKS = ("embed",)
