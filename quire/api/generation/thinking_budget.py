"""The budget of reasoning of a request, `thinking_token_budget`, as a part of the answer's grammar.

quire/structured/thinking.py enforces it. Knows no API: Messages has the number in another field.
Always holds: a model that does not reason gets no budget, and the field is reported as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.api.generation.request_context import RequestContext
from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.base.thinking_budget import FIELD, MAX_TOKENS, ThinkingBudget
from quire.output_parsers.reasoning import ReasoningMarks, is_open
from quire.output_parsers.registry import HARMONY
from quire.output_parsers.selection import ParserSelection, select_parsers

# Enough to hold an opening mark at the end of a prompt, and white space after it.
_LAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """A budget as a request has it; -1 is no limit, as in vLLM. param: the field, which errors
    name. Raises InvalidParameter."""

    num_tokens: Any
    param: str = FIELD

    def __post_init__(self) -> None:
        num_tokens, param = self.num_tokens, self.param
        if type(num_tokens) is not int or not -1 <= num_tokens <= MAX_TOKENS:
            raise InvalidParameter(
                f"{param} is {show(num_tokens)}; a whole number of tokens is allowed, or -1 for "
                "no limit",
                param=param,
            )
        if num_tokens == 0:
            ThinkingBudget(max_tokens=0, param=param)  # refused


def budget_of(given: Mapping[str, Any]) -> AskedBudget | None:
    """Return the budget of a request with our field, checked. Raises InvalidParameter."""
    return AskedBudget(given[FIELD]) if FIELD in given else None


def with_budget(
    request: RequestContext,
    sampling: SamplingParams,
    reading: ParserSelection,
    prompt: str,
    budget: AskedBudget,
) -> SamplingParams:
    """Return the parameters with a grammar that ends the reasoning when the budget is spent.

    reading: how the answer is parsed.
    """
    num_tokens, param = budget.num_tokens, budget.param
    if num_tokens == -1:
        return sampling
    marks, limit = reading.reasoning, ThinkingBudget(max_tokens=num_tokens, param=param)
    if marks is None:
        request.ignore(param)
        return sampling
    if isinstance(marks, ReasoningMarks):
        opened = is_open(prompt, marks)
        limit = replace(limit, opens=marks.opens, closes=marks.closes, is_open=opened)
    grammar = sampling.structured_outputs
    if grammar is None:
        grammar = Grammar(kind=GrammarKind.ANY, text="", param=param)
    return replace(sampling, structured_outputs=replace(grammar, thinking=limit))


def with_budget_of_text(
    request: RequestContext, sampling: SamplingParams, prompt: str | Sequence[int], given: Any
) -> SamplingParams:
    """Return the parameters of a prompt without messages: reasoning has the model's own marks.

    prompt: a text, or its ids. given: the budget. Raises InvalidParameter.
    """
    template, tokenizer = request.engine.template, request.engine.tokenizer
    reading = select_parsers(
        "" if template is None else template.source(),
        reasoning_parser=request.config.reasoning_parser,
    )
    if not isinstance(prompt, str):
        prompt = tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
    if reading.reasoning == HARMONY:
        raise InvalidParameter(
            f"{FIELD} is given, and this model reasons in a channel that a chat's template opens; "
            "send the prompt as messages (/v1/chat/completions), or leave it out",
            param=FIELD,
        )
    return with_budget(request, sampling, reading, prompt, AskedBudget(given))
