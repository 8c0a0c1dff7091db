"""LLM and AsyncLLM: the engine as a library."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import (
    CapacityError,
    ContextTooLong,
    InvalidParameter,
    QueueTimedOut,
    SettingError,
    TokenizerError,
    WorkerError,
)
from quire.base.records import FinishReason
from quire.base.scheduling_params import SchedulingParams
from quire.engine.process.messages import FromEngine, Refused, fault_of
from tests.data import outside

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, threads=1, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_stories260k_greedy_is_the_published_text(executor: str) -> None:
    folder = outside("stories260K")
    expected = json.loads((folder / "greedy_200.json").read_text())
    with LLM(folder, executor=executor) as stories:
        (answer,) = stories.generate(
            [expected["prompt_ids"]],
            SamplingParams(temperature=0.0, max_tokens=len(expected["ids"]), ignore_eos=True),
        )
    assert list(answer.token_ids) == expected["ids"]
    assert answer.text == expected["text"]


def test_kv_blocks_are_counted_before_the_first_step(model: Path) -> None:
    async def story() -> None:
        async with AsyncLLM(model, executor="reference") as waiting:
            stats = waiting.client.stats
            assert stats.blocks_total == stats.blocks_free == waiting.client.card.num_blocks > 0

    asyncio.run(story())


def test_native_and_reference_agree_on_a_tiny_model(model: Path, llm: LLM) -> None:
    (native,) = llm.generate("Hello", GREEDY)
    with LLM(model, executor="reference") as reference:
        (other,) = reference.generate("Hello", GREEDY)
    assert native.token_ids == other.token_ids
    assert native.text == other.text


def test_prompt_scores_equal_those_of_generation(llm: LLM) -> None:
    asked = replace(GREEDY, logprobs=3, logprob_token_ids=(7, 300, 7))
    (told,) = llm.generate("the sea and the camel", asked)
    ids = [*told.prompt_ids, *told.token_ids]
    only = SamplingParams(seed=0, prompt_logprobs=3, max_tokens=0)
    (scored,) = llm.generate([ids], only)
    assert (scored.text, scored.token_ids) == ("", ())
    assert scored.finish_reason is FinishReason.LENGTH
    assert len(scored.prompt_logprobs) == len(ids)
    assert scored.prompt_logprobs[0] is None
    for known, generated in zip(
        scored.prompt_logprobs[len(told.prompt_ids) :], told.logprobs, strict=True
    ):
        assert known is not None
        assert (known.token_id, known.logprob) == (generated.token_id, generated.logprob)
        assert [(top.token_id, top.logprob) for top in known.top] == [
            (top.token_id, top.logprob) for top in generated.top
        ]
        assert known.rank == 1  # greedy
        listed = generated.listed
        assert [one.token_id for one in listed] == [7, 300, 7]
        assert listed[0].logprob == listed[2].logprob < 0
    (again, other) = llm.generate([ids, ids], [only, replace(only, prompt_logprobs=0)])
    assert list(again.prompt_logprobs) == list(scored.prompt_logprobs)
    assert [token and token.top for token in other.prompt_logprobs] == [None, *[()] * len(ids[1:])]


def test_scores_are_returned_once_for_all_choices_and_do_not_change_them(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=5, ignore_eos=True)
    (plain,) = llm.generate("the sea and", params)
    assert plain.prompt_logprobs == ()
    (scored,) = llm.generate("the sea and", replace(params, prompt_logprobs=1))
    assert [one.token_ids for one in scored.outputs] == [one.token_ids for one in plain.outputs]
    assert len(scored.prompt_logprobs) == len(scored.prompt_ids)


def test_a_scored_prompt_may_fill_the_context_and_not_exceed_it(llm: LLM) -> None:
    only = SamplingParams(prompt_logprobs=0, max_tokens=0)
    room = llm.card.max_model_len
    (answer,) = llm.generate([[5] * room], only)
    assert len(answer.prompt_logprobs) == room
    with pytest.raises(ContextTooLong, match=f"{room + 1} tokens"):
        llm.generate([[5] * (room + 1)], only)


def test_prompts_may_be_one_or_many_text_or_ids(llm: LLM) -> None:
    (one,) = llm.generate("Hello", GREEDY)
    (same,) = llm.generate(list(one.prompt_ids), GREEDY)
    both = llm.generate(["Hello", list(one.prompt_ids)], GREEDY)
    assert one.prompt == "Hello"
    assert same.prompt is None
    assert [answer.token_ids for answer in both] == [one.token_ids, same.token_ids]
    assert llm.generate([], GREEDY) == []


def test_many_prompts_return_in_order_each_as_if_alone(llm: LLM) -> None:
    prompts = [[0, *range(5, 6 + length)] for length in range(30)]
    params = [
        SamplingParams(seed=index, max_tokens=3 + index % 9, ignore_eos=True) for index in range(30)
    ]
    together = llm.generate(prompts, params)
    for prompt, one, answer in zip(prompts, params, together, strict=True):
        assert list(answer.prompt_ids) == prompt
        assert llm.generate([prompt], one)[0].outputs[0].token_ids == answer.token_ids


def test_several_choices_differ_by_stream_and_share_a_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True, logprobs=1)
    (answer,) = llm.generate([[0, 9, 9]], params)
    assert [choice.index for choice in answer.outputs] == [0, 1, 2]
    assert len({choice.token_ids for choice in answer.outputs}) == 3
    assert {choice.seed for choice in answer.outputs} == {5}
    assert len(answer.logprobs) == 10
    assert llm.generate([[0, 9, 9]], params)[0].outputs == answer.outputs


def test_a_drawn_seed_is_returned_and_reproduces_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (first,) = llm.generate([[0, 9]], params)
    seed = first.outputs[0].seed
    assert seed is not None
    again = SamplingParams(max_tokens=8, ignore_eos=True, seed=seed)
    assert llm.generate([[0, 9]], again)[0].token_ids == first.token_ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (full,) = llm.generate("Hello", GREEDY)
    stop = full.text[3:5]
    stopping = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate("Hello", stopping)
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.outputs[0].stop_reason == stop


def test_bad_requests_raise_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="600 tokens"):
        llm.generate([[0, 1], [0] * 600], GREEDY)
    with pytest.raises(InvalidParameter, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(InvalidParameter, match="token id 999"):
        llm.generate([[999]], GREEDY)
    with pytest.raises(InvalidParameter, match="2 terms for 1 prompts"):
        llm.generate(["a"], terms=[SchedulingParams(), SchedulingParams(priority=1)])
    with pytest.raises(InvalidParameter, match="terms is 5; a SchedulingParams for all prompts"):
        llm.generate(["a"], terms=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=r"sampling_params is .*max_tokens"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    assert len(llm.generate("still here", GREEDY)) == 1


def test_a_chat_accepts_template_fields_and_rejects_unknown_ones(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{{ mood }}"
        "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(model, threads=1, chat_template=file) as llm:
        [answer] = llm.chat(said, one, tools=[{"name": "look"}], chat_template_kwargs={"mood": "!"})
        assert answer.prompt == "[look]!<Hi><So>"
        [answer] = llm.chat(said, one, mood="?", continue_final_message=True)
        assert answer.prompt == "?<Hi><So"
        for wrong in ({"mod": 1}, {"chat_template_kwargs": {"mod": 1}}):
            with pytest.raises(InvalidParameter, match=r"has no variable .* it has: mood"):
                llm.chat(said, one, **wrong)
        with pytest.raises(InvalidParameter, match="no chat template named 'x'"):
            llm.chat(said, one, chat_template="x")
        with pytest.raises(InvalidParameter, match="does not use documents"):
            llm.chat(said, one, documents=[{"text": "a"}])
        with pytest.raises(InvalidParameter, match=r"chat_template_kwargs is \[1\]; an object"):
            llm.chat(said, one, chat_template_kwargs=[1])


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("Hi", r'messages is "Hi"; a list'),
        ([[]], r"messages is \[\]; a list"),
        (["Hi"], r'messages is "Hi"; a list'),
        ([{"role": "usr", "content": "Hi"}], r'messages\[0\].role is "usr"; allowed: system'),
        ([{"role": "user"}], r"messages\[0\].content is missing; a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "the model reads text only"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls is \[\"x\"\]; a list of obj"),
    ],
)
def test_messages_are_accepted_as_by_the_server(llm: LLM, messages: Any, told: str) -> None:
    with pytest.raises(InvalidParameter, match=told) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.param == "messages"


def test_arguments_of_tool_calls_are_read_as_by_the_server(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "calls.jinja"
    file.write_text(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": [1]}'}}
    with LLM(model, threads=1, chat_template=file) as llm:
        [answer] = llm.chat([{"role": "assistant", "tool_calls": (call,)}], GREEDY)
    assert answer.prompt == '{"at": [1]}'


def test_a_chats_answers_are_parsed_as_by_the_server(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "hermes.jinja"
    file.write_text(
        "{% for t in tools or [] %}[{{ t }}]{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% endfor %}{# <think></think><tool_call> #}"
    )
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    text = f"<think>So.</think>\n\nLet me see.\n{call}"
    function = {"name": "look", "parameters": {"type": "object"}}
    said = SamplingParams(structured_outputs={"choice": [text]}, max_tokens=200, n=2)
    messages = [{"role": "user", "content": "Hi"}]
    with LLM(model, threads=1, chat_template=file) as llm:
        for tools in ([{"type": "function", "function": function}], [function]):
            [answer] = llm.chat(messages, said, tools=tools)
            for completion in answer.outputs:
                message = completion.message
                assert message is not None
                assert (message.reasoning, message.content) == ("So.", "Let me see.")
                assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [
                    ("look", {"at": 1})
                ]
            assert answer.text == text
        [answer] = llm.chat(messages, said)  # no tools: then nothing is a call
        assert answer.outputs[0].message is not None
        assert answer.outputs[0].message.content == f"Let me see.\n{call}"
        [answer] = llm.generate("Hi", said)
        assert answer.outputs[0].message is None


def test_an_invalid_chat_template_is_a_setting_error(model: Path) -> None:
    with pytest.raises(SettingError, match="neither a file nor the name"):
        LLM(model, threads=1, chat_template="nowhere.jinja")


def test_an_interrupted_call_leaves_the_engine_usable(llm: LLM) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    before = llm.generate("Hello", GREEDY)
    next_message = llm._next_message
    llm._next_message = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(Interrupted):
        llm.generate(["Hello", "there"], long)
    llm._next_message = next_message  # type: ignore[method-assign]
    assert llm.generate("Hello", GREEDY) == before


def test_more_prompts_than_the_queue_holds_are_submitted_gradually(model: Path) -> None:
    with LLM(model, threads=1, max_num_seqs=2, max_queued_requests=2) as small:
        answers = small.generate([[0, 5, 6]] * 9, GREEDY)
    assert len({answer.token_ids for answer in answers}) == 1


def test_several_choices_per_prompt_never_overfill_the_queue(model: Path) -> None:
    params = SamplingParams(n=5, seed=1, max_tokens=3, ignore_eos=True)
    with LLM(model, threads=1, max_num_seqs=2, max_queued_requests=3) as small:
        answers = small.generate([[0, 5, 6]] * 4, params)
    assert [len(answer.outputs) for answer in answers] == [5] * 4


def test_a_progress_bar_is_drawn_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, progress=True)
    shown = capsys.readouterr()
    assert "generating" in shown.out + shown.err
    llm.generate(["a", "b"], GREEDY)
    quiet = capsys.readouterr()
    assert quiet.out + quiet.err == ""


@pytest.mark.parametrize("given", [5, None, ["a", 5], {"prompt": "a"}, b"a", [b"a"], [{"a": 1}]])
def test_an_invalid_prompt_is_rejected_with_the_valid_types(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidParameter, match="a text, a list of token ids, or a list") as caught:
        llm.generate(given, GREEDY)
    assert caught.value.param == "prompt"


def test_arrays_are_accepted_as_lists_of_ids(llm: LLM) -> None:
    ids = np.array([5, 6])
    [one] = llm.generate(ids, GREEDY)
    assert [answer.prompt_ids for answer in llm.generate([ids, [7]], GREEDY)] == [(5, 6), (7,)]
    assert one.prompt_ids == (5, 6)


def test_a_chat_is_a_prompt_in_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt == "<|begin|><|user|>Hi<|end|><|assistant|>"
    assert llm.chat([messages, messages], GREEDY)[1].token_ids == answer.token_ids


def test_a_model_without_a_template_cannot_chat_but_can_complete(
    model_without_template: Path,
) -> None:
    with LLM(model_without_template, threads=1) as bare:
        with pytest.raises(TokenizerError, match="no chat template"):
            bare.chat([{"role": "user", "content": "Hi"}])
        assert bare.generate("Hi", GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_the_card_and_the_memory_plan_are_available(llm: LLM) -> None:
    assert llm.card.max_model_len == 512
    assert llm.card.dtype == "f32"
    assert llm.card.fingerprint.startswith("fp_")
    assert "KV cache" in llm.memory_text


def test_small_limits_work_down_to_the_smallest(model: Path) -> None:
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}
    with LLM(model, threads=1, **settings) as small:
        (answer,) = small.generate([[7]], SamplingParams(temperature=0.0, ignore_eos=True))
        assert len(answer.token_ids) == 1


def test_a_step_budget_in_milliseconds_changes_no_token(model: Path, llm: LLM) -> None:
    with LLM(model, threads=1, step_budget_ms=0.2) as budgeted:
        prompt = [0, *range(5, 200)]
        assert (
            budgeted.generate([prompt], GREEDY)[0].token_ids
            == llm.generate([prompt], GREEDY)[0].token_ids
        )


def test_unknown_or_unsuitable_settings_are_rejected(model: Path) -> None:
    with pytest.raises(SettingError, match="max_num_seqs"):
        LLM(model, max_num_seq=3)
    with pytest.raises(SettingError, match="max_model_len is 4096; the model allows at most 512"):
        LLM(model, max_model_len=4096)


def test_a_closed_llm_raises(model: Path) -> None:
    closed = LLM(model, threads=1)
    closed.close()
    closed.close()
    with pytest.raises(WorkerError, match="closed"):
        closed.generate("Hello", GREEDY)


def test_plans_are_recorded_on_request(model: Path, tmp_path: Path) -> None:
    from quire.engine.record import read_records

    path = tmp_path / "plans"
    with LLM(model, threads=1, record_plans=str(path)) as recorded:
        (answer,) = recorded.generate("Hello", GREEDY)
    results = [record.result for record in read_records(path)]
    ids = [int(id_) for result in results if result is not None for id_ in result.token_ids]
    assert tuple(ids) == answer.token_ids


def test_a_trace_is_written_on_request(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(model, threads=1, trace_file=str(path)) as traced:
        traced.generate("Hello", GREEDY)
    events = json.loads(path.read_text())
    assert {"step", "request", "queue", "decode"} <= {event["name"] for event in events}
    with pytest.raises(SettingError, match=r"trace .*no/trace cannot be written"):
        LLM(model, trace_file=str(tmp_path / "no" / "trace"))
    with pytest.raises(CapacityError):
        LLM(model, trace_file=str(path), kv_cache_memory="1TiB")
    assert list(tmp_path.iterdir()) == [path], "a failed start leaves no file"


def test_an_unwritable_record_is_a_setting_error_before_packing(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=r"record_plans .*no/plans cannot be written"):
        LLM(model, record_plans=str(tmp_path / "no" / "plans"))
    for file in model.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:20] if "safetensors" in file.name else content)
    with pytest.raises(SettingError, match="record_plans"):
        LLM(tmp_path, record_plans=str(tmp_path))


def test_an_unavailable_instruction_set_is_a_setting_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", "abacus")
    with pytest.raises(SettingError, match='QUIRE_ISA is "abacus"; this machine can run'):
        LLM(model, threads=1)


def test_the_async_engine_streams_the_same_and_can_be_abandoned(model: Path, llm: LLM) -> None:
    (expected,) = llm.generate("Hello", GREEDY)

    async def play() -> None:
        async with AsyncLLM(model, threads=1) as engine:
            text, ids = "", []
            async for delta in engine.generate("Hello", GREEDY):
                text += delta.text
                ids += delta.token_ids
            assert (text, tuple(ids)) == (expected.text, expected.token_ids)
            long = SamplingParams(max_tokens=400, ignore_eos=True)
            async with aclosing(engine.generate("Hello", long)) as deltas:
                async for _ in deltas:
                    break
            while engine.client.stats.running:
                await asyncio.sleep(0.005)
            assert engine.client.stats.blocks_used == 0
            with pytest.raises(InvalidParameter, match=r"prompt is 5; a text"):
                await anext(engine.generate(5, GREEDY))  # type: ignore[arg-type]
            chat = [d async for d in engine.chat([{"role": "user", "content": "Hi"}], GREEDY)]
            assert chat[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(play())


def test_the_async_engine_raises_the_startup_error(tmp_path: Path) -> None:
    from quire.base.errors import ConfigError

    async def play() -> None:
        with pytest.raises(ConfigError):
            async with AsyncLLM(tmp_path / "nothing"):
                pass

    asyncio.run(play())


def test_importing_quire_loads_neither_numpy_nor_the_engine() -> None:
    script = (
        "import sys, quire\n"
        "assert 'numpy' not in sys.modules and 'msgspec' not in sys.modules\n"
        "import os; assert os.environ['OPENBLAS_NUM_THREADS'] == '1'\n"
        "try: quire.nothing\n"
        "except AttributeError as error: assert 'LLM' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_step_with_drafts_imports_anything() -> None:
    """An import counts as time that drafts took: np.median and np.unique import numpy.ma once."""
    script = (
        "import sys\n"
        "from quire import LLM, SamplingParams\n"
        "from quire.speculative.drafter import Drafter\n"
        "found, verified = [], Drafter.verified\n"
        "def watched(*given): found.append(given); verified(*given)\n"
        "Drafter.verified = watched\n"
        "llm = LLM(threads=1, speculate='ngram')\n"
        "llm.generate('a', SamplingParams(max_tokens=2))\n"
        "before = set(sys.modules)\n"
        "text = 'the cat sat on the mat and the dog sat on the rug. ' * 8\n"
        "llm.generate(text, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))\n"
        "assert found, 'nothing was drafted'\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_step_with_forks_imports_anything() -> None:
    script = (
        "import sys\n"
        "from quire import LLM, SamplingParams\n"
        "llm = LLM(threads=1)\n"
        "llm.generate('a', SamplingParams(max_tokens=2))\n"
        "before = set(sys.modules)\n"
        "llm.generate('Once upon a time', SamplingParams(max_tokens=4, n=3, seed=1))\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_timed_out_prompt_is_an_error_and_the_others_are_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine rejects the second prompt's streams because they waited too long."""
    next_message = llm._next_message
    told: list[str] = []

    def late() -> FromEngine:
        if told:
            return next_message()
        told.extend(list(llm._streams._open)[-2:])
        error = QueueTimedOut("it waited too long")
        return Refused(request_ids=tuple(told), fault=fault_of(error))

    monkeypatch.setattr(llm, "_next_message", late)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=2)
    served, refused = llm.generate([[5], [6]], sampling)
    assert len(told) == 2
    assert [len(one.token_ids) for one in served.outputs] == [3, 3]
    assert [one.error for one in refused.outputs] == ["it waited too long"] * 2
    assert [one.finish_reason for one in refused.outputs] == [FinishReason.ERROR] * 2
    assert not any(one.token_ids for one in refused.outputs)
