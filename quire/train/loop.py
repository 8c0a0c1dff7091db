"""The training loop of draft heads: AdamW over texts in a drawn order, with checkpoints.

A checkpoint (training.safetensors) holds the parameters, the persistent buffers, the moments of the
optimizer with the steps in which each parameter had a gradient, and the number of steps. It is of
one model, by its weights and program. A training that continues from one sees the texts that it
would have seen without the interruption. Knows no kind of head: a module computes the loss of a
text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from quire.base.errors import SettingError, WeightsError
from quire.train.progress import Progress
from quire.train.teacher import Lesson, Teacher
from quire.train.tensor_file import read_tensors, write_tensors
from quire.train.texts import Text

CHECKPOINT = "training.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """steps: updates of the parameters, each from `batch` texts. checkpoint_steps: between two
    checkpoints."""

    steps: int
    batch: int
    learning_rate: float
    warmup_steps: int
    checkpoint_steps: int
    seed: int


class Head(Protocol):
    """What is trained. `own` names the settings that a checkpoint must agree with; persistent
    buffers are kept in it and taken from it."""

    own: Mapping[str, Any]

    def loss(self, text: Text, lesson: Lesson) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a text, and numbers to report."""

    def named_parameters(self) -> Any: ...
    def state_dict(self) -> Any: ...
    def train(self) -> Any: ...


def train(
    head: Head,
    teacher: Teacher,
    texts: Sequence[Text],
    settings: LoopSettings,
    folder: Path,
    progress: Progress,
) -> None:
    """Train `head` until `settings.steps`, from the checkpoint in `folder` if there is one."""
    parameters: dict[str, torch.nn.Parameter] = dict(head.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    shared = {**teacher.own, "seed": settings.seed, "batch": settings.batch}
    own = json.dumps({**head.own, **shared}, sort_keys=True)
    step = _resume(folder / CHECKPOINT, head, parameters, optimizer, own)
    if step:
        progress.say(f"continuing after step {step}")
    averages: dict[str, float] = {}
    head.train()
    while step < settings.steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(step, settings)
        optimizer.zero_grad(set_to_none=True)
        for number in _drawn(len(texts), step, settings):
            text = _cut(texts[number], teacher.max_tokens)
            loss, numbers = head.loss(text, teacher.lesson(text.ids))
            value = float(loss.detach())
            if not math.isfinite(value):
                raise SettingError(f"the loss of step {step} is {value}; lower --lr")
            (loss / settings.batch).backward()
            for name, new in {"loss": value, **numbers}.items():
                averages[name] = 0.98 * averages.get(name, new) + 0.02 * new
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        step += 1
        progress.show("steps", step, settings.steps, **averages)
        if step % settings.checkpoint_steps == 0 or step == settings.steps:
            _save(folder / CHECKPOINT, head, parameters, optimizer, step, own)


def _drawn(num_texts: int, step: int, settings: LoopSettings) -> list[int]:
    """Return the texts of a step: all texts come once before any comes again."""
    numbers = range(step * settings.batch, (step + 1) * settings.batch)
    drawn = []
    for number in numbers:
        epoch, at = divmod(number, num_texts)
        drawn.append(int(np.random.default_rng([settings.seed, epoch]).permutation(num_texts)[at]))
    return drawn


def _rate(step: int, settings: LoopSettings) -> float:
    """Return the share of the learning rate: linear warm-up, then a half cosine down to 5 %."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done))


def _cut(text: Text, max_tokens: int) -> Text:
    return Text(text.ids[:max_tokens], min(text.num_prompt_tokens, max_tokens))


def _save(
    path: Path,
    head: Head,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    step: int,
    own: str,
) -> None:
    tensors = {f"parameter.{name}": value.detach().numpy() for name, value in parameters.items()}
    for name, value in parameters.items():
        # AdamW knows nothing of a parameter that has had no gradient yet.
        state = optimizer.state[value]
        tensors[f"steps.{name}"] = np.array([float(state.get("step", 0.0))], np.float32)
        for moment in _MOMENTS:
            found = state.get(moment)
            tensors[f"{moment}.{name}"] = (
                np.zeros(tuple(value.shape), np.float32) if found is None else found.numpy()
            )
    for name, value in _kept(head, parameters).items():
        tensors[f"kept.{name}"] = value.numpy()
    write_tensors(path, tensors, {"step": str(step), "own": own})


def _kept(head: Head, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return what is part of a head beside its parameters: its persistent buffers, as views."""
    return {name: value for name, value in head.state_dict().items() if name not in parameters}


def _resume(
    path: Path,
    head: Head,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    own: str,
) -> int:
    """Take over a checkpoint; return its steps, 0 without one. Raises SettingError if it is damaged
    or of another training."""
    if not path.exists():
        return 0
    try:
        tensors, metadata = read_tensors(path)
    except WeightsError as error:
        raise SettingError(
            f"{path} cannot be read, or is damaged, so that no training continues from it; delete "
            "the file to begin anew with the same texts"
        ) from error
    kept = _kept(head, parameters)
    expected = {f"steps.{name}": (1,) for name in parameters}
    expected |= {
        f"{kind}.{name}": tuple(value.shape)
        for name, value in parameters.items()
        for kind in ("parameter", *_MOMENTS)
    }
    expected |= {f"kept.{name}": tuple(value.shape) for name, value in kept.items()}
    found = {name: values.shape for name, values in tensors.items()}
    step = metadata.get("step", "")
    if metadata.get("own") != own or found != expected or not step.isdecimal():
        raise SettingError(
            f"{path} is the checkpoint of a training with other settings, or for another model "
            f"({metadata.get('own')}, not {own}); give another --out, or delete the file to begin "
            "anew, and the texts beside it if another model has written them"
        )
    with torch.no_grad():
        for name, value in kept.items():
            value.copy_(torch.from_numpy(tensors[f"kept.{name}"]))
        for name, value in parameters.items():
            value.copy_(torch.from_numpy(tensors[f"parameter.{name}"]))
            if num_steps := float(tensors[f"steps.{name}"][0]):
                moments = {one: torch.from_numpy(tensors[f"{one}.{name}"]) for one in _MOMENTS}
                optimizer.state[value] = {"step": torch.tensor(num_steps), **moments}
    return int(step)
