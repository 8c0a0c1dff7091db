"""POST /v1/score and /v1/rerank: how well texts fit each other.

With an embedding model a score is the similarity of two vectors. With a model that judges
(classifier_from_token in its config.json) it is the probability of the token for yes against that
for no, after a prompt with the query and the document. Always holds: a score depends on its own two
texts, the instruction and the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.embeddings.inputs import (
    Cutting,
    cut,
    cutting_of,
    input_ids,
    listed_texts,
    yield_regularly,
)
from quire.api.embeddings.score_texts import MAX_TOKENS, shortened, sides_of
from quire.api.generation.answer_json import prompt_usage_json
from quire.api.generation.choice_streams import Choice, Prompt
from quire.api.generation.fields import flag
from quire.api.generation.generate import (
    ChunkWriter,
    Envelope,
    GenerationJob,
    GenerationRequest,
    StreamOptions,
)
from quire.api.generation.request_context import checked_ids
from quire.api.generation.text_bounds import check_text_bytes
from quire.api.generation.usage import Usage
from quire.base.errors import InvalidParameter, ModelError, WorkerError
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.engine.client.pooling_checks import pooling_of
from quire.engine.output.embedding import pooling_params, similarity, vector_of
from quire.engine.output.output_stream import TextDelta
from quire.models.pooling_files import PoolingSpec

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt that Qwen3-Reranker was trained with.
JUDGE_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
JUDGE_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two texts, by their places among the prompts; with a model that judges both are the place of
    the one prompt."""

    left: int
    right: int


class ScoreWriter(ChunkWriter):
    """Write scores as /v1/score has them. Nothing here is streamed."""

    def __init__(self, envelope: Envelope, pooling: PoolingSpec, pairs: Sequence[Pair]) -> None:
        super().__init__(envelope.frame("list"), StreamOptions())
        self._pooling, self._pairs = pooling, pairs

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body."""
        written = [
            {"object": "score", "index": index, "score": score}
            for index, score in enumerate(self.scores(choices))
        ]
        return {**self._frame, "data": written, "usage": prompt_usage_json(usage)}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield nothing: scores are not streamed."""
        yield from ()

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: there is no text."""

    def scores(self, choices: Sequence[Sequence[Choice]]) -> list[float]:
        """Return the score of each pair."""
        answers = [choice for (choice,) in choices]
        if self._pooling.judges is not None:
            return [_judged(answers[pair.left]) for pair in self._pairs]
        vectors = []
        for answer in answers:
            if answer.pooled is None:
                raise WorkerError("the engine ended a request without its embedding")
            vectors.append(vector_of(answer.pooled, self._pooling))
        return [
            similarity(vectors[pair.left], vectors[pair.right], self._pooling)
            for pair in self._pairs
        ]


class RerankWriter(ScoreWriter):
    """Write documents in the order of their scores, as Jina and Cohere do."""

    def __init__(
        self,
        envelope: Envelope,
        pooling: PoolingSpec,
        pairs: Sequence[Pair],
        *,
        documents: Sequence[str],
        top_n: int,
        returns_documents: bool,
    ) -> None:
        super().__init__(envelope, pooling, pairs)
        self._documents, self._top_n = documents, top_n
        self._returns_documents = returns_documents

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body; documents with equal scores stay in their order."""
        scores = self.scores(choices)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [
            {"index": index, "relevance_score": scores[index], **self._document(index)}
            for index in order[: self._top_n]
        ]
        return {**self._frame, "results": results, "usage": prompt_usage_json(usage)}

    def _document(self, index: int) -> dict[str, Any]:
        return {"document": {"text": self._documents[index]}} if self._returns_documents else {}


async def read_score(request: GenerationRequest) -> GenerationJob:
    """Check the fields of /v1/score. Raises InvalidParameter and ContextTooLong."""
    pooling = _scoring_of(request)
    names = first, second = sides_of(request.given)
    left = listed_texts(request.given.get(first), param=first)
    right = listed_texts(request.given.get(second), param=second)
    if len(left) not in (1, len(right)):
        raise InvalidParameter(
            f"{first} has {len(left)} texts and {second} has {len(right)}; one text of {first} for "
            f"all, or as many as {second}, are allowed",
            param=first,
        )
    prompts, pairs = await _prompts(request, pooling, left, right, params=names)
    return GenerationJob(prompts=prompts, writer=ScoreWriter(request.envelope, pooling, pairs))


async def read_rerank(request: GenerationRequest) -> GenerationJob:
    """Check the fields of /v1/rerank. Raises InvalidParameter and ContextTooLong."""
    given, pooling = request.given, _scoring_of(request)
    query = given.get("query")
    if not isinstance(query, str):
        raise InvalidParameter(
            f"query is {'missing' if query is None else show(query)}; a text is needed",
            param="query",
        )
    documents = given.get("documents")
    if not isinstance(documents, list):
        raise InvalidParameter(
            f"documents is {'missing' if documents is None else show(documents)}; a list of texts "
            'is needed, or of objects such as {"text": "..."}',
            param="documents",
        )
    texts = listed_texts(documents, param="documents")
    top_n = given.get("top_n", 0)
    if type(top_n) is not int or top_n < 0:
        raise InvalidParameter(
            f"top_n is {show(top_n)}; a whole number from 1 is allowed, or 0 for all documents",
            param="top_n",
        )
    returns = flag(given, "return_documents")
    prompts, pairs = await _prompts(request, pooling, [query], texts, params=("query", "documents"))
    writer = RerankWriter(
        request.envelope,
        pooling,
        pairs,
        documents=texts,
        top_n=top_n or len(texts),
        returns_documents=returns,
    )
    return GenerationJob(prompts=prompts, writer=writer)


def _scoring_of(request: GenerationRequest) -> PoolingSpec:
    """Return how the model scores. Raises InvalidParameter where it does not."""
    card = request.engine.card
    pooling = pooling_of(card, scores=True)
    instruction = request.given.get("instruction")
    if instruction is not None and pooling.judges is None:
        raise InvalidParameter(
            "instruction is given and the model compares vectors; write the instruction into the "
            "query, as the model's documentation says",
            param="instruction",
        )
    if instruction is not None and not isinstance(instruction, str):
        raise InvalidParameter(
            f"instruction is {show(instruction)}; a text is allowed", param="instruction"
        )
    return pooling


async def _prompts(
    request: GenerationRequest,
    pooling: PoolingSpec,
    left: Sequence[str],
    right: Sequence[str],
    *,
    params: tuple[str, str],
) -> tuple[list[Prompt], list[Pair]]:
    """Return the prompts that are computed, and which of them make each pair."""
    cutting = cutting_of(request.given, request.engine)
    left = await shortened(request.context, left, MAX_TOKENS[0])
    right = await shortened(request.context, right, MAX_TOKENS[1])
    queries = list(left) * len(right) if len(left) == 1 else list(left)
    if pooling.judges is not None:
        return await _judge_prompts(request, pooling.judges, queries, right, cutting, params[1])
    sampling = pooling_params(pooling)
    prompts: list[Prompt] = []
    for param, texts in zip(params, (left, right), strict=True):
        before = _side_prompt(pooling, is_query=param == params[0])
        for text in texts:
            await yield_regularly(len(prompts))
            ids = await input_ids(request.context, text, cutting, before=before, param=param)
            prompts.append(Prompt(token_ids=ids, sampling=sampling))
    pairs = [
        Pair(left=at if len(left) > 1 else 0, right=len(left) + at) for at in range(len(right))
    ]
    return prompts, pairs


def _side_prompt(pooling: PoolingSpec, *, is_query: bool) -> str:
    """Return what precedes a query or a document: the model's prompt of that name, else its
    default."""
    name = "query" if is_query else "document"
    if name in pooling.prompts:
        return pooling.prompts[name]
    return "" if pooling.default_prompt is None else pooling.prompts[pooling.default_prompt]


async def _judge_prompts(
    request: GenerationRequest,
    judges: tuple[str, str],
    queries: Sequence[str],
    documents: Sequence[str],
    cutting: Cutting,
    param: str,
) -> tuple[list[Prompt], list[Pair]]:
    """Return one prompt for each pair, which asks the model for yes or no."""
    engine = request.engine
    encode = engine.tokenizer.encode
    ids = [encode(token, add_special_tokens=False) for token in judges]
    if any(len(of_token) != 1 for of_token in ids):
        raise ModelError(
            f"classifier_from_token is {list(judges)}, which the tokenizer writes as "
            f"{ids}; each must be one token"
        )
    (no_id,), (yes_id,) = ids
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, seed=0, logprobs=0, logprob_token_ids=(no_id, yes_id)
    )
    before = encode(JUDGE_BEFORE, add_special_tokens=False)
    after = encode(JUDGE_AFTER, add_special_tokens=False)
    instruction = request.given.get("instruction", DEFAULT_INSTRUCTION)
    prompts = []
    for at, (query, document) in enumerate(zip(queries, documents, strict=True)):
        await yield_regularly(at)
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        check_text_bytes(engine, text, param=param)
        pair_ids = await request.context.run_in_thread(encode, text, add_special_tokens=False)
        if cutting.keep_tokens is not None:
            most = min(cutting.keep_tokens, engine.card.max_model_len - 1)
            pair_ids = list(cut(pair_ids, most - len(before) - len(after), cutting))
        token_ids = checked_ids(engine, [*before, *pair_ids, *after], param=param)
        prompts.append(Prompt(token_ids=token_ids, sampling=sampling))
    return prompts, [Pair(left=at, right=at) for at in range(len(prompts))]


def _judged(choice: Choice) -> float:
    """Return the probability of yes against no."""
    no, yes = (token.logprob for token in choice.logprobs[0].listed)
    if math.isinf(no) or math.isinf(yes):
        return float(yes > no)
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
