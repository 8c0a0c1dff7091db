"""How many tokens an answer took, from the usage that its last bytes report.

Reads the names of all APIs that replicas speak. In JSON a quote inside a text is escaped, so a text
that quotes such a name is not mistaken for it.
"""

from __future__ import annotations

import re

_PROMPT = re.compile(
    rb'"(?:prompt_tokens|input_tokens|prompt_eval_count|tokens_evaluated)": ?(\d{1,12})\b'
)
_OUTPUT = re.compile(
    rb'"(?:completion_tokens|output_tokens|eval_count|tokens_predicted)": ?(\d{1,12})\b'
)
TAIL_BYTES = 16_384


def used_tokens(body: bytes) -> tuple[int, int] | None:
    """Return the tokens of prompt and output; None where the body reports none."""
    tail = body[-TAIL_BYTES:]
    prompts, outputs = _PROMPT.findall(tail), _OUTPUT.findall(tail)
    if not prompts and not outputs and len(body) > TAIL_BYTES:
        prompts, outputs = _PROMPT.findall(body), _OUTPUT.findall(body)
    if not prompts and not outputs:
        return None
    return int(prompts[-1]) if prompts else -1, int(outputs[-1]) if outputs else 0
