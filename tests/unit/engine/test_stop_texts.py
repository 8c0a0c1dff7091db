"""StopTexts: the tokenizer is loaded in the background, once; failures end only requests
with it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import QuireError, TokenizerError
from quire.base.records import FinishReason, StepPlan
from quire.engine.assembly import assemble, features
from quire.engine.stop_texts import StopTexts
from quire.runner.handle import Handle
from quire.runner.model_runner import ModelRunner

PROMPT = "Once upon a time there was a little"
BEAMS = SamplingParams(
    n=3, use_beam_search=True, temperature=0.0, max_tokens=20, stop=(".", " who")
)


def test_beams_end_at_stop_strings_and_their_text_is_cut_there() -> None:
    with LLM(max_num_seqs=4, num_threads=1) as llm:
        [answer] = llm.generate([PROMPT], BEAMS)
        kept = llm.generate([PROMPT], BEAMS.changed(include_stop_str_in_output=True))[0]
        drawn = SamplingParams(seed=1, max_tokens=30)
        crowd = llm.generate([PROMPT, PROMPT, PROMPT], [drawn, BEAMS, drawn])[1]
    stopped = [one for one in answer.outputs if one.finish_reason is FinishReason.STOP]
    assert stopped
    for one, whole in zip(answer.outputs, kept.outputs, strict=True):
        assert not any(stop in one.text for stop in BEAMS.stop)
        assert (one.token_ids, one.score) == (whole.token_ids, whole.score)
        assert whole.text == one.text + str(one.stop_reason or "")
    assert [(one.token_ids, one.score) for one in crowd.outputs] == [
        (one.token_ids, one.score) for one in answer.outputs
    ]


def test_others_are_served_while_the_tokenizer_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded only after tokens of other requests have been generated."""
    serves, may_read, plain = threading.Event(), threading.Event(), assemble.model_tokenizer

    class ReportingRunner(ModelRunner):
        def submit(self, plan: StepPlan) -> Handle:
            if serves.is_set() and plan.samples.any():
                may_read.set()
            return super().submit(plan)

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert may_read.wait(120)
        return plain(*args, **kwargs)

    monkeypatch.setattr(assemble, "model_tokenizer", slow)
    monkeypatch.setattr(features, "ModelRunner", ReportingRunner)
    with LLM(max_num_seqs=4, num_threads=1) as llm:
        serves.set()
        answers = llm.generate([PROMPT, PROMPT], [BEAMS, SamplingParams(max_tokens=5, seed=1)])
    assert [one.error for answer in answers for one in answer.outputs] == [None] * 4


def test_it_is_loaded_once_and_only_on_demand() -> None:
    told = threading.Event()
    reads: list[int] = []

    def load() -> Any:
        reads.append(1)
        return object()

    texts = StopTexts(load)
    texts.on_settled = told.set
    assert not texts.is_settled
    texts.want()
    texts.want()
    assert told.wait(60)
    assert texts.is_ready
    texts.tokenizer()
    texts.want()
    assert reads == [1]


@pytest.mark.parametrize("fault", [TokenizerError("no tokenizer here"), KeyError("merges")])
def test_a_failed_load_rejects_only_requests_that_need_it(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise fault

    monkeypatch.setattr(assemble, "model_tokenizer", fails)
    with LLM(max_num_seqs=4, num_threads=1) as llm:
        for _ in range(2):
            with pytest.raises(QuireError, match=r"no tokenizer here|KeyError"):
                llm.generate([PROMPT], BEAMS)
        plain = llm.generate([PROMPT], SamplingParams(max_tokens=3, stop="x"))[0]
        assert plain.outputs[0].error is None
