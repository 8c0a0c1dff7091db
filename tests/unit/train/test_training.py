"""Training of draft heads on a tiny model: it learns, continues, and its heads can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.train.progress import Progress
from quire.train.tensor_file import write_tensors
from quire.weights.checkpoint import open_checkpoint

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from quire.train import eagle  # noqa: E402
from tests.unit.train.commands import KINDS, trained  # noqa: E402


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_training_that_is_interrupted_goes_on_as_if_it_had_not_been(
    kind: str, deep_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # With a constant rate of learning, so that both trainings have the same one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.train.loop._rate", lambda step, settings: 1.0)
        assert trained(kind, deep_model, prompts, whole, 6) == 0
        assert trained(kind, deep_model, prompts, parts, 3) == 0
        with (parts / "texts.jsonl").open("a") as file:
            file.write('{"ids": [1, 2')  # cut short by a kill
        assert trained(kind, deep_model, prompts, parts, 6) == 0
    assert "continuing after step 3" in capsys.readouterr().err
    one, other = open_checkpoint(whole), open_checkpoint(parts)
    assert one.names == other.names
    for name in one.names:
        assert one.tensor(name).raw.tobytes() == other.tensor(name).raw.tobytes()
    assert (whole / "texts.jsonl").read_bytes() == (parts / "texts.jsonl").read_bytes()
    assert trained(kind, deep_model, prompts, parts, 12, "--batch", "3") == 1
    assert "checkpoint of a training with other settings" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_with_what_to_do(
    deep_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained("medusa", deep_model, prompts, tmp_path, 3) == 0
    path = tmp_path / "training.safetensors"
    write_tensors(tmp_path / "masks", {"a": np.ones(8, bool)}, {})
    whole = path.read_bytes()
    for damaged in ((tmp_path / "masks").read_bytes(), whole[: len(whole) // 2], whole[:4]):
        path.write_bytes(damaged)
        capsys.readouterr()
        assert trained("medusa", deep_model, prompts, tmp_path, 6) == 1
        said = capsys.readouterr().err
        assert f"{path} cannot be read, or is damaged" in said
        assert "delete the file to begin anew" in said
    path.unlink()
    assert trained("medusa", deep_model, prompts, tmp_path, 6) == 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_head_learns_and_is_served(
    kind: str, deep_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []

    def show(self: Progress, what: str, done: int, total: int, **values: float) -> None:
        losses.extend(value for name, value in values.items() if name == "loss")

    monkeypatch.setattr(Progress, "show", show)
    assert trained(kind, deep_model, prompts, tmp_path, 80, "--dtype", "f16", "--lr", "0.02") == 0
    assert losses[-1] < 0.97 * losses[0]
    sampling = SamplingParams(temperature=0.8, max_tokens=20, seed=3, ignore_eos=True)
    with LLM(deep_model, threads=1, max_num_seqs=2) as plain:
        wanted = plain.generate(["the cat and"], sampling)[0].outputs[0].token_ids
    with LLM(
        deep_model, threads=1, max_num_seqs=2, speculate=kind, draft_model=str(tmp_path)
    ) as llm:
        assert llm.generate(["the cat and"], sampling)[0].outputs[0].token_ids == wanted
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == 307
    assert not list(tmp_path.glob("*.part"))


def test_eagle_rounds_see_what_drafting_sees() -> None:
    """The rounds of training are those of drafting: round n of row p is computed from rows of the
    target up to p - n and one own row for each position after."""
    torch.manual_seed(1)
    heads, rows, width, rounds = 2, 7, 4, 3
    keys = [torch.randn(heads, rows, width) for _ in range(rounds)]
    values = [torch.randn(heads, rows, width) for _ in range(rounds)]
    q = torch.randn(heads, rows, width)
    found = eagle._attend(q, keys, values)
    last = rounds - 1
    for row in range(last, rows):
        pairs = [(0, at) for at in range(row - last + 1)]
        pairs += [(number, row - last + number) for number in range(1, last + 1)]
        key = torch.stack([keys[number][:, at] for number, at in pairs], 1)
        value = torch.stack([values[number][:, at] for number, at in pairs], 1)
        shares = ((key @ q[:, row, :, None])[..., 0] / width**0.5).softmax(-1)
        wanted = (shares[..., None] * value).sum(1)
        assert torch.allclose(found[:, row], wanted, atol=1e-5)


def test_the_trained_head_and_the_served_one_compute_the_same(
    deep_model: Path, prompts: Path, tmp_path: Path
) -> None:
    """The drafts of a served head are those of the trained module."""
    assert trained("eagle", deep_model, prompts, tmp_path, 3, "--dtype", "f32") == 0
    from quire.speculative.eagle import EagleProposer

    taps = eagle.taps_of(None, deep_model)
    teacher = eagle.Teacher(deep_model, max_tokens=64, num_threads=1, layers=taps)
    stored = open_checkpoint(tmp_path)
    ids = np.frombuffer(stored.tensor("d2t").raw.tobytes(), "<i8") + np.arange(200)
    shape = {"heads": 5, "kv_heads": 1, "head_dim": 16, "inner": 97}
    head = eagle.EagleHead(
        eagle.embedding_of(teacher), torch.tensor(ids), target_width=60, shape=shape, rounds=1
    )
    with torch.no_grad():
        for name, value in head.named_parameters():
            value.copy_(torch.from_numpy(stored.read_f32(name)))
    drafts: list[tuple[int, int]] = []
    propose = EagleProposer.propose

    def watching(self: Any, tokens: Any, slots: Any, limits: Any, found: Any) -> None:
        propose(self, tokens, slots, limits, found)
        drafts.append((int(tokens.lengths[slots[0]]), int(found.ids[0, 0])))

    with pytest.MonkeyPatch.context() as patch:
        settings: dict[str, Any] = {"speculate": "eagle", "draft_model": str(tmp_path)}
        with LLM(deep_model, threads=1, max_num_seqs=1, max_draft_tokens=1, **settings) as llm:
            patch.setattr(EagleProposer, "propose", watching)
            patch.setattr(
                "quire.speculative.control.AdaptiveControl.limits",
                lambda self, slots, limits, *cost: limits,
            )
            patch.setattr(  # as the clock has it
                "quire.scheduler.speculation.plain_steps.PlainSteps.begin_if_due",
                lambda *_, **__: False,
            )
            patch.setattr("quire.speculative.draft_balance.DraftBalance._add", lambda *given: None)
            sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            answer = llm.generate([[5, 6, 7, 8]], sampling)[0]
    text = [5, 6, 7, 8, *answer.outputs[0].token_ids]
    lesson = teacher.lesson(text)
    with torch.no_grad():
        hidden = head.fc(torch.from_numpy(lesson.taps[:-1]))
        embedded = head.midlayer.input_layernorm(head.embedding[torch.tensor(text[1:])])
        both = torch.cat((embedded, head.midlayer.hidden_norm(hidden)), -1)
        q, k, v = head.midlayer.qkv(both, torch.arange(len(hidden)))
        stream = head.midlayer.rest(hidden, eagle._attend(q, [k], [v]))
        guessed = head.token_ids[head.lm_head(head.norm(stream)).argmax(-1)].tolist()
    assert len(drafts) > 8
    assert all(guessed[length - 2] == draft for length, draft in drafts)


@pytest.mark.parametrize(
    ("option", "values"), [("--seed", ["-1", "9" * 30]), ("--lr", ["nan", "-1", "0", "inf"])]
)
def test_numbers_that_no_training_has_are_refused(
    prompts: Path,
    tmp_path: Path,
    option: str,
    values: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in values:
        with pytest.raises(SystemExit):
            trained("medusa", tmp_path / "none", prompts, tmp_path, 3, f"{option}={value}")
        assert f"argument {option}: {value} is no " in capsys.readouterr().err


def test_what_cannot_be_trained_is_refused(
    deep_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "other" / "texts.jsonl"
    texts.parent.mkdir()
    texts.write_text('{"model": "another"}\n')
    assert trained("medusa", deep_model, prompts, texts.parent, 3) == 1
    assert "has texts that were made otherwise" in capsys.readouterr().err
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    assert trained("medusa", deep_model, empty, tmp_path, 3) == 1
    assert "there is no prompt in it" in capsys.readouterr().err
    assert trained("medusa", deep_model, tmp_path / "none.txt", tmp_path, 3) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert trained("eagle", deep_model, prompts, tmp_path, 3, "--taps", "1", "2", "4") == 1
    assert "three different numbers from 1 to 3" in capsys.readouterr().err
    assert not (tmp_path / "texts.jsonl").exists()  # refused before anything is generated
    assert trained("eagle", deep_model, prompts, tmp_path, 3, "--num-kv-heads", "2") == 1
    assert "--num-heads 5 is no multiple of 2 KV heads" in capsys.readouterr().err
