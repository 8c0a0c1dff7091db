"""quire complete: standard output is the answer, or one JSON object with all details."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.base.sampling_params import SamplingParams
from quire.engine.library.llm import LLM
from tests.data import outside
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import quire_main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab_size=270)


def test_the_answer_is_that_of_the_engine(model: Path) -> None:
    with LLM(model) as llm:
        [answer] = llm.generate("Hi there", SamplingParams(temperature=0.0, max_tokens=9))
    words = (str(model), "--prompt", "Hi there", "--temperature", "0", "--max-tokens", "9")
    assert quire_main("complete", *words).stdout == answer.text + "\n"
    echoed = quire_main("complete", *words, "--echo")
    assert echoed.stdout == "Hi there" + answer.text + "\n"
    assert echoed.returncode == 0


def test_json_has_ids_logprobs_counts_and_times(model: Path) -> None:
    done = quire_main(
        "complete", str(model), "-p", "Hi", "--json", "--logprobs", "2", "--max-tokens", "5",
        "--temperature", "0.5", "--seed", "11",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["prompt"] == "Hi"
    assert len(report["token_ids"]) == report["usage"]["completion_tokens"] <= 5
    assert len(report["prompt_ids"]) == report["usage"]["prompt_tokens"]
    assert report["seed"] == 11
    assert report["finish_reason"] in ("length", "stop")
    assert [token["id"] for token in report["logprobs"]] == report["token_ids"]
    assert all(len(token["top"]) == 2 for token in report["logprobs"])
    assert set(report["timing"]) == {"load_ms", "first_text_ms", "total_ms", "tokens_per_s"}
    with LLM(model) as llm:
        sampling = SamplingParams(temperature=0.5, seed=11, max_tokens=5)
        assert list(llm.generate("Hi", sampling)[0].token_ids) == report["token_ids"]


def test_the_prompt_may_be_piped_in(model: Path) -> None:
    words = ("complete", str(model), "--temperature", "0", "--max-tokens", "3")
    assert quire_main(*words, given="two\nlines").stdout == (
        quire_main(*words, "--prompt", "two\nlines").stdout
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--logprobs", "2", "-p", "x"], "--logprobs is shown with --json only"),
        (["--echo", "--json", "-p", "x"], "leave out --echo"),
        (["-p", "x", "--temperature", "nan"], "--temperature is NaN; a finite number"),
        (["-p", "x", "--max-tokens", "100000"], "--max-tokens is 100000"),
        (["-p", "x", "--max-num-seqs", "0"], "--max-num-seqs is 0; at least 1"),
        (["-p", "x", "--stop", ""], 'stop holds ""'),
    ],
)
def test_a_failure_is_one_line_and_exit_code_2(
    model: Path, words: list[str], complaint: str
) -> None:
    done = quire_main("complete", str(model), *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("quire complete: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_invalid_text_is_rejected(model: Path) -> None:
    done = quire_main("complete", str(model), given=b"ab\xff")
    assert done.returncode == 2
    assert "standard input is not UTF-8: its byte 2 is 0xff" in done.stderr


def test_a_directory_without_a_model_is_rejected(tmp_path: Path) -> None:
    done = quire_main("complete", str(tmp_path), "-p", "x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr


def test_the_story_equals_the_published_one() -> None:
    folder = outside("stories260K")
    greedy = json.loads((folder / "greedy_200.json").read_text(encoding="utf-8"))
    words = (str(folder), "-p", "", "--temperature", "0", "--max-tokens", str(len(greedy["ids"])))
    assert quire_main("complete", *words).stdout == greedy["text"] + "\n"
