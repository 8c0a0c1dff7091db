"""Llamas with rotary frequencies that depend on the served length: dynamic scaling, and longrope.

transformers uses the length of the sequence, so the prompt of the dynamic case is as long as the
model (128 positions before scaling, 512 after), and the other's is beyond its original length.
"""

from __future__ import annotations

from tests.models.case import Case

FACTORS = [1.1, 1.3, 1.8, 2.6, 3.3, 6.0, 11.0, 20.5]

CASES = (
    Case(
        "rope_dynamic",
        {"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        length=512,
        seed=61,
    ),
    Case(
        "rope_longrope",
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": FACTORS,
                "original_max_position_embeddings": 100,
            }
        },
        length=130,
        seed=62,
    ),
)
