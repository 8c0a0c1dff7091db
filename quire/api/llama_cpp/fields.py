"""The request fields of llama.cpp's native routes, with the fields of ours that they can carry.

Sampling fields are those of completions: names of llama.cpp that mean the same are synonyms in
foreign_fields.py (`repeat_penalty`, `grammar`, `json_schema`). Answers have one choice.
"""

from __future__ import annotations

from quire.api.generation.continued_answer import CONTINUED_STREAMS
from quire.api.generation.field_set import FieldSet
from quire.api.generation.fields import SAMPLING, SCHEDULING

_NOT_CARRIED = frozenset(
    {
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
        "logprob_token_ids",
        "return_cached_tokens_details",
    }
)
_EVERYWHERE = ((SAMPLING | SCHEDULING) - _NOT_CARRIED) | {
    "model",
    "prompt",
    "stream",
    *CONTINUED_STREAMS,
    "n_predict",
    "n_probs",
    "logprobs",
    "id_slot",
    "return_tokens",
    "timings_per_token",
    "return_progress",
    "response_fields",
    "t_max_predict_ms",
    "n_indent",
    "cache_salt",
    "speculation",
}
LLAMA_COMPLETION = _EVERYWHERE | {"add_special_tokens", "prediction"}
_OF_VECTORS = frozenset(
    {
        "model",
        "input",
        "content",
        "embd_normalize",
        "encoding_format",
        "dimensions",
        "prompt_name",
        "add_special_tokens",
        "cache_salt",
        "priority",
        "deadline_ms",
    }
)
LLAMA_EMBEDDING = FieldSet(_OF_VECTORS, input_names="content")
LLAMA_INFILL = _EVERYWHERE | {"input_prefix", "input_suffix", "input_extra"}
