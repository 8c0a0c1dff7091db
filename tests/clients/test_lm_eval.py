"""lm-eval: a local task over HTTP gives the numbers of the engine used as a library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="not installed here; `make clients` has it")
pytest.importorskip("datasets", reason="not installed here; `make clients` has it")

import lm_eval
from lm_eval.tasks import TaskManager

from quire import LLM, SamplingParams
from tests.clients.conftest import BOX
from tests.serve.running_server import RunningServer

STORIES = [
    {"text": "Once upon a time, there was a little", "ends": [" girl", " stone", " dog who ran"]},
    {"text": "Tom and Lily went to the", "ends": [" park", " moon and the sun", " sea"]},
    {"text": "The cat was very", "ends": [" sad", " happy. She smiled", " and"]},
]
TASKS = {
    "story_ends": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "story_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "story_goes_on": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{ends[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    stories = folder / "stories.jsonl"
    stories.write_text("".join(f"{json.dumps(story)}\n" for story in STORIES))
    for name, task in TASKS.items():
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(stories)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BOX, threads=1) as llm:
        yield llm


def evaluated(tasks: TaskManager, name: str, model: str, url: str, **arguments: Any) -> list[Any]:
    """Return the samples of a task in order: requests and responses."""
    path = "chat/completions" if "chat" in model else "completions"
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "model": "box",
            "base_url": f"{url}/{path}",
            "max_length": 512,
            "max_retries": 1,
            **arguments,
        },
        tasks=[name],
        task_manager=tasks,
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
    )
    samples = results["samples"][name]
    assert len(samples) == len(STORIES)
    return sorted(samples, key=lambda sample: sample["doc_id"])


def scores(llm: LLM, ids: list[int], first: int) -> tuple[float, bool]:
    """Return the log-probability of the tokens from `first` on, and whether each was the
    most likely.
    """
    scored = SamplingParams(prompt_logprobs=1, max_tokens=0)
    (answer,) = llm.generate([ids], scored)
    told = [token for token in answer.prompt_logprobs[first:] if token is not None]
    assert len(told) == len(ids) - first
    return sum(token.logprob for token in told), all(token.rank == 1 for token in told)


def ids_of(server: RunningServer, text: str) -> list[int]:
    _, found = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    ids: list[int] = found["tokens"]
    return ids


@pytest.mark.parametrize(
    "how",
    [{}, {"num_concurrent": 4}, {"batch_size": 4}],
    ids=["one by one", "concurrent", "in batches"],
)
def test_likelihoods_over_http_equal_the_engines(
    box_server: RunningServer, box: str, tasks: TaskManager, llm: LLM, how: dict[str, Any]
) -> None:
    samples = evaluated(tasks, "story_ends", "local-completions", box, **how)
    greedy = []
    for sample, story in zip(samples, STORIES, strict=True):
        assert len(sample["filtered_resps"]) == len(story["ends"])
        for told, end in zip(sample["filtered_resps"], story["ends"], strict=True):
            context = ids_of(box_server, story["text"])
            whole = ids_of(box_server, f"{story['text']}{end}")
            assert whole[: len(context)] == context
            expected, is_greedy = scores(llm, whole, len(context))
            assert told[0] == pytest.approx(expected, abs=1e-5)
            assert told[1] is is_greedy
            greedy.append(is_greedy)
    assert len(set(greedy)) == 2  # some are greedy, some are not


def test_texts_are_scored_as_a_whole(
    box_server: RunningServer, box: str, tasks: TaskManager, llm: LLM
) -> None:
    (begin,) = ids_of(box_server, "<|begin|>")
    # lm-eval treats a begin-of-text token of id 0 as none.
    how = {"custom_prefix_token_id": begin}
    samples = evaluated(tasks, "story_text", "local-completions", box, **how)
    for sample, story in zip(samples, STORIES, strict=True):
        expected, _ = scores(llm, [begin, *ids_of(box_server, str(story["text"]))], 1)
        assert sample["filtered_resps"][0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("how", [{}, {"num_concurrent": 3}], ids=["one by one", "concurrent"])
@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_texts_over_http_equal_the_engines(
    box_server: RunningServer,
    box: str,
    tasks: TaskManager,
    llm: LLM,
    model: str,
    how: dict[str, Any],
) -> None:
    samples = evaluated(tasks, "story_goes_on", model, box, **how)
    greedy = SamplingParams(temperature=0, max_tokens=24, stop=["."])
    for sample, story in zip(samples, STORIES, strict=True):
        text = str(story["text"])
        if "chat" in model:
            (answer,) = llm.chat([{"role": "user", "content": text}], greedy)
        else:
            (answer,) = llm.generate([ids_of(box_server, text)], greedy)
        assert sample["filtered_resps"] == [answer.text]
