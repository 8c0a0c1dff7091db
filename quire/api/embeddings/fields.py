"""The request fields of /v1/embeddings, /pooling, /v1/score and /v1/rerank.

Knows names and allowed words only. Always holds: no field of sampling is among them, since nothing
is generated.
"""

from __future__ import annotations

from quire.api.generation.field_set import FieldSet

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
EMBEDDINGS = FieldSet(
    _EVERYWHERE | {"input", "encoding_format", "dimensions", "normalize", "prompt_name"},
    input_names="input",
)
POOLING = FieldSet(EMBEDDINGS | {"task"}, input_names="input")
_PAIRS = _EVERYWHERE | {"instruction", "max_tokens_per_query", "max_tokens_per_doc"}
SCORE = FieldSet(
    _PAIRS | {"text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"},
    input_names="text_1 and text_2",
)
RERANK = FieldSet(
    _PAIRS | {"query", "documents", "top_n", "return_documents"}, input_names="query and documents"
)

ENCODINGS = ("float", "base64")
SIDES = ("right", "left")
# What vLLM's /pooling may be asked for; only one vector a text is returned here.
TASKS = ("embed",)
