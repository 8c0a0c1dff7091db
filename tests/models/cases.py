"""The tiny models whose logits are compared with transformers, live and as recorded numbers.

A family is a file cases_NAME.py with its cases, and a line here.
"""

from __future__ import annotations

from tests.models import cases_gemma, cases_llama, cases_phi3, cases_rope
from tests.models.case import Case

CASES: tuple[Case, ...] = (
    *cases_llama.CASES,
    *cases_rope.CASES,
    *cases_phi3.CASES,
    *cases_gemma.CASES,
)
