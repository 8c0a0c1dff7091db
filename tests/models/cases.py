"""The tiny models with logits that are compared with transformers, live and as recorded numbers.

A family is a file cases_NAME.py with its cases, and a line here.
"""

from __future__ import annotations

from tests.models import (
    cases_experts,
    cases_gemma,
    cases_gpt2,
    cases_granite,
    cases_llama,
    cases_mistral,
    cases_olmo,
    cases_opt,
    cases_phi3,
    cases_qwen,
    cases_rope,
    cases_smollm3,
    cases_stablelm,
    cases_starcoder2,
)
from tests.models.case import Case

CASES: tuple[Case, ...] = (
    *cases_llama.CASES,
    *cases_rope.CASES,
    *cases_mistral.CASES,
    *cases_qwen.CASES,
    *cases_smollm3.CASES,
    *cases_phi3.CASES,
    *cases_gemma.CASES,
    *cases_gpt2.CASES,
    *cases_opt.CASES,
    *cases_granite.CASES,
    *cases_olmo.CASES,
    *cases_starcoder2.CASES,
    *cases_stablelm.CASES,
    *cases_experts.CASES,
)
DENSE = tuple(case for case in CASES if not case.has_experts)
