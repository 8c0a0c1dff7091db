"""JSON Schemas of embeddings and scores: fields of requests, and answers.

Fields that these routes share with others are in field_schemas.py. Knows no route.
"""

from __future__ import annotations

from quire.api.embeddings.fields import ENCODINGS, SIDES, TASKS
from quire.api.embeddings.inputs import MAX_INPUTS
from quire.api.embeddings.score_texts import MAX_TOKENS
from quire.api.embeddings.score_texts import SIDES as SIDE_NAMES
from quire.api.openapi.field_schemas import (
    FLAG,
    TEXT,
    Known,
    Schema,
    list_of,
    object_of,
    or_null,
    token_id_row,
    whole_object,
)

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TEXT_OBJECT: Schema = {"anyOf": [TEXT, whole_object(text=TEXT)]}


def embedding_rows(known: Known) -> dict[str, Schema]:
    """Return the fields that have another form than in other APIs, or exist here only."""
    ids = list_of(token_id_row(known), least=1)
    texts = list_of(_TEXT_OBJECT, least=1, most=MAX_INPUTS)
    several = [list_of(TEXT, least=1, most=MAX_INPUTS), list_of(ids, least=1, most=MAX_INPUTS)]
    return {
        "input": {"anyOf": [TEXT, ids, *several]},
        "encoding_format": {"enum": list(ENCODINGS)},
        "dimensions": {"type": "integer", "minimum": 1},
        "normalize": FLAG,
        "prompt_name": TEXT,
        "task": {"enum": list(TASKS)},
        "truncation_side": {"enum": list(SIDES)},
        "instruction": TEXT,
        **{name: {**_COUNT, "maximum": 2**31 - 1} for name in MAX_TOKENS},
        "query": TEXT,
        "documents": texts,
        "top_n": _COUNT,
        "return_documents": FLAG,
    }


def score_rows(known: Known) -> dict[str, Schema]:
    """Return those of /v1/score: both sides under each of their names."""
    own = embedding_rows(known)
    side: Schema = {"anyOf": [_TEXT_OBJECT, own["documents"]]}
    return {**own, **{name: side for pair in SIDE_NAMES for name in pair}}


def embedding_answers() -> dict[str, Schema]:
    """Return the answers by name."""
    vector: Schema = {"anyOf": [list_of(_NUMBER), TEXT]}
    result = object_of(
        {
            "index": _COUNT,
            "relevance_score": _NUMBER,
            "document": whole_object(text=TEXT),
        },
        needed=("index", "relevance_score"),
    )
    return {
        "Embeddings": _list("data", "embedding", embedding=vector),
        "PooledVectors": _list("data", "pooling", data=vector),
        "Scores": _list("data", "score", score=_NUMBER),
        "Ranking": _framed(results=list_of(result)),
    }


def _list(name: str, kind: str, **own: Schema) -> Schema:
    entry = whole_object(object={"const": kind}, index=_COUNT, **own)
    return _framed(**{name: list_of(entry)})


def _framed(**own: Schema) -> Schema:
    return whole_object(
        id=TEXT,
        object={"const": "list"},
        created=_COUNT,
        model=TEXT,
        system_fingerprint=or_null(TEXT),
        **own,
        usage={"$ref": "#/components/schemas/Usage"},
    )
