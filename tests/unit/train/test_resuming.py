"""What a training continues from: a checkpoint of the same model, taps, tokens and moments."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from quire.train.progress import Progress
from quire.weights.checkpoint import open_checkpoint
from tests.tiny_models import write_tiny_llama

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from quire.train.loop import CHECKPOINT, LoopSettings, train  # noqa: E402
from quire.train.teacher import Teacher  # noqa: E402
from quire.train.texts import Text  # noqa: E402
from tests.unit.train.commands import KINDS, arguments, trained  # noqa: E402

# Runs a command that gets a signal in its eighth step, or while it writes its second checkpoint.
SIGNALLED = """
import os, signal, sys
from quire.train import eagle, loop, medusa
kind, place, number, *arguments = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs it behind
drawn, fsync, calls = loop._drawn, os.fsync, []
def in_step(num_texts, step, settings):
    if step == 7:
        os.kill(os.getpid(), int(number))
    return drawn(num_texts, step, settings)
def in_write(file):
    calls.append(file)
    if len(calls) == 2:
        os.kill(os.getpid(), int(number))
    fsync(file)
if place == "step":
    loop._drawn = in_step
else:
    os.fsync = in_write
sys.exit({"eagle": eagle, "medusa": medusa}[kind].main(arguments))
"""
MORE_TEXT = ["--draft-vocab-size", "40"]


def tokens_of(head: Path) -> list[int]:
    """Return the token ids that a head knows."""
    table = open_checkpoint(head).tensor("d2t").raw.tobytes()
    return (np.frombuffer(table, "<i8") + np.arange(40)).tolist()


@pytest.mark.parametrize("more", [["--tokens", "3000"], ["--max-tokens", "8"]])
def test_a_head_keeps_its_tokens_whatever_texts_follow(
    deep_model: Path, prompts: Path, tmp_path: Path, more: list[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert trained("eagle", deep_model, prompts, one, 3, *MORE_TEXT) == 0
    before = tokens_of(one)
    assert trained("eagle", deep_model, prompts, other, 3, *MORE_TEXT, *more) == 0
    assert trained("eagle", deep_model, prompts, one, 6, *MORE_TEXT, *more) == 0
    assert tokens_of(one) == before
    assert tokens_of(other) != before, "a new head would know others"


def test_other_taps_are_other_settings(
    deep_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained("eagle", deep_model, prompts, tmp_path, 3) == 0
    assert trained("eagle", deep_model, prompts, tmp_path, 6, "--taps", "3", "2", "1") == 1
    assert "checkpoint of a training with other settings" in capsys.readouterr().err
    assert trained("eagle", deep_model, prompts, tmp_path, 6, "--taps", "1", "2", "3") == 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_another_model_in_the_same_place_is_noticed(
    kind: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_tiny_llama(model, seed=3, num_hidden_layers=3)
    assert trained(kind, model, prompts, out, 3) == 0
    write_tiny_llama(model, seed=4, num_hidden_layers=3)
    assert trained(kind, model, prompts, out, 6) == 1
    assert "made otherwise, or by another model" in capsys.readouterr().err
    texts = out / "texts.jsonl"
    texts.rename(tmp_path / "texts.jsonl")
    assert trained(kind, model, prompts, out, 6) == 1
    assert "or for another model" in capsys.readouterr().err
    (tmp_path / "texts.jsonl").rename(texts)
    write_tiny_llama(model, seed=3, num_hidden_layers=3)
    assert trained(kind, model, prompts, out, 6) == 0


class LateHead(torch.nn.Module):  # type: ignore[misc]  # PyTorch may be missing
    """A part of it has gradients in some texts only."""

    own: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.late = torch.nn.Parameter(torch.tensor([3.0, 4.0]))

    def loss(self, text: Text, lesson: Any) -> tuple[torch.Tensor, dict[str, float]]:
        scale = float(np.abs(lesson.logits).mean())
        total = (self.early**2).sum() * scale
        if len(text.ids) > 4:
            total = total + (self.late**3).sum() * scale
        return total, {}


def test_a_part_without_gradients_so_far_goes_on_as_if_it_had_not_been_interrupted(
    deep_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.train.loop._rate", lambda step, settings: 1.0)
    texts = [Text((5, 6, 7, 8, 9), 1)] + [Text((5, 6, 7), 1)] * 5 + [Text((7, 8), 1)] * 2
    teacher = Teacher(deep_model, max_tokens=16, num_threads=1)

    def run(folder: Path, steps: int) -> LateHead:
        folder.mkdir(exist_ok=True)
        head = LateHead()
        settings = LoopSettings(
            steps=steps,
            batch=1,
            learning_rate=0.01,
            warmup_steps=1,
            checkpoint_steps=1,
            seed=1,
        )
        train(head, teacher, texts, settings, folder, Progress())
        return head

    num_steps = 2 * len(texts)
    whole = run(tmp_path / "whole", num_steps)
    parts, moved = LateHead(), []
    for step in range(1, num_steps + 1):
        late = parts.late.detach().clone()
        parts = run(tmp_path / "parts", step)
        moved.append(not torch.equal(late, parts.late.detach()))
    assert not moved[0]
    assert any(moved)
    assert torch.equal(whole.early, parts.early)
    assert torch.equal(whole.late, parts.late)
    one, other = (open_checkpoint(tmp_path / name / CHECKPOINT) for name in ("whole", "parts"))
    assert all(np.array_equal(one.read_f32(name), other.read_f32(name)) for name in one.names)
    teacher.close()


def test_heads_that_no_answer_reaches_are_refused(
    deep_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ["--heads", "16", "--answer-tokens", "12"]
    assert trained("medusa", deep_model, prompts, tmp_path, 3, *long) == 1
    assert "the longest answer has 12 tokens (--answer-tokens 12)" in capsys.readouterr().err
    assert not (tmp_path / "texts.jsonl").exists()
    cut = ["--heads", "16", "--max-tokens", "20"]
    assert trained("medusa", deep_model, prompts, tmp_path, 3, *cut) == 1
    error = capsys.readouterr().err
    assert "tokens (within --max-tokens 20), so that heads after the first" in error
    assert trained("medusa", deep_model, prompts, tmp_path, 3, "--heads", "16") == 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_training_continues_after_its_disk_was_full(
    kind: str,
    deep_model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert trained(kind, deep_model, prompts, whole, 9) == 0
    fsync, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert trained(kind, deep_model, prompts, parts, 9) == 1
    path = parts / CHECKPOINT
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {path}: cannot be written: No space left on device; free")
    assert sorted(file.name for file in parts.iterdir()) == ["texts.jsonl", CHECKPOINT]
    assert trained(kind, deep_model, prompts, parts, 9) == 0
    assert "continuing after step 3" in capsys.readouterr().err
    for file in whole.iterdir():
        assert file.read_bytes() == (parts / file.name).read_bytes(), file.name


def test_an_out_that_cannot_be_made_is_refused(
    deep_model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained("eagle", deep_model, prompts, prompts / "heads", 3) == 1
    assert capsys.readouterr().err.startswith(f"error: --out {prompts / 'heads'}: no directory")


@pytest.mark.parametrize(
    ("kind", "number", "place"),
    [
        ("eagle", signal.SIGKILL, "step"),
        ("eagle", signal.SIGKILL, "write"),
        ("medusa", signal.SIGKILL, "step"),
        ("eagle", signal.SIGINT, "step"),
    ],
)
def test_a_training_that_a_signal_ended_gives_the_same_bytes(
    kind: str,
    number: signal.Signals,
    place: str,
    deep_model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert trained(kind, deep_model, prompts, whole, 12) == 0
    given = arguments(kind, deep_model, prompts, parts, 12)
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED, kind, place, str(int(number)), *given],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if number == signal.SIGKILL:
        assert ended.returncode == -signal.SIGKILL
    else:
        assert ended.returncode == 130
        assert "Traceback" not in ended.stderr
        last = ended.stderr.splitlines()[-1]
        assert last.startswith(
            "interrupted: the same command, run again, continues from the texts and the "
            f"checkpoint in {parts}"
        )
        assert not list(parts.glob("*.part"))
    capsys.readouterr()
    assert trained(kind, deep_model, prompts, parts, 12) == 0
    assert f"continuing after step {6 if place == 'step' else 3}" in capsys.readouterr().err
    assert {file.name for file in parts.iterdir()} == {file.name for file in whole.iterdir()}
    for file in whole.iterdir():
        assert file.read_bytes() == (parts / file.name).read_bytes(), file.name
