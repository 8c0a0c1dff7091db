"""Train the built-in model, or its smaller draft model, and write the Hugging Face files.

Products in bfloat16, weights in float32, saved in bfloat16. The given time fixes the run: the
learning rate and the mixture of texts follow the elapsed share of it, so a slow machine makes a
shorter run, never a broken one. The draft model (--teacher) learns the whole distribution of the
teacher instead of the texts. The saved weights are a running average.

After the first evaluation the output directory holds a complete, loadable model; the order of the
texts depends on the seed alone.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import time
from pathlib import Path

import corpus
import torch
from model import BOX, DRAFT, Llama, as_saved, load_model, sum_of_losses, write_model
from questions import Questions
from rows import NOT_LEARNED, RowDealer
from tokenizers import Tokenizer
from tool_talk import ToolTalk
from topics import find_nouns
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA_FOLDER = Path(os.environ.get("QUIRE_DATA", ROOT.parent / "shared" / "data"))

PEAK_RATE = 4e-3
LAST_RATE = 0.02  # of the peak
WARM_SHARE, FLAT_SHARE = 0.015, 0.1  # of the run
WEIGHT_DECAY = 0.1
AVERAGE_DECAY = 0.98
AVERAGE_EVERY = 4
NUM_EVALUATIONS = 8


def text_loss(model: Llama, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the learned targets [B, T] after ids [B, T], in nats a token."""
    scores = model(ids).float().flatten(0, 1)
    return F.cross_entropy(scores, targets.flatten(), ignore_index=NOT_LEARNED)


def teacher_loss(model: Llama, ids: Tensor, targets: Tensor, teacher: Llama) -> Tensor:
    """Return the cross-entropy with the teacher's distribution, over the learned targets."""
    with torch.no_grad():
        wanted = torch.softmax(teacher(ids).float().flatten(0, 1), dim=-1)
    scores = torch.log_softmax(model(ids).float().flatten(0, 1), dim=-1)
    learned = (targets.flatten() != NOT_LEARNED).float()
    return -((wanted * scores).sum(dim=-1) * learned).sum() / learned.sum()


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the embedding and the norms.

    Muon learns to attend to the prompt in far fewer steps than AdamW alone.
    """
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    others = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95)),
    ]


def learning_rate(progress: float) -> float:
    """Return the share of the peak rate: warm up, constant, then linear decay."""
    warm = min(1.0, progress / WARM_SHARE + 0.01)
    fallen = max(0.0, (progress - FLAT_SHARE) / (1 - FLAT_SHARE))
    return warm * (1 - (1 - LAST_RATE) * fallen)


@torch.no_grad()
def move_average(average: Llama, model: Llama, num_moves: int) -> None:
    decay = min(AVERAGE_DECAY, (1 + num_moves) / (10 + num_moves))
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(weight, 1 - decay)


@torch.no_grad()
def mix_in(model: Llama, start: Llama, share: float) -> None:
    """Interpolate the weights towards those of the start model, by this share.

    Between a model and its fine-tuned successor the loss of stories is lower than at either end.
    """
    for weight, old in zip(model.parameters(), start.parameters(), strict=True):
        weight.lerp_(old.to(weight.device), share)


@torch.no_grad()
def calibrate(model: Llama, rows: list[list[int]]) -> None:
    """Scale the last norm, and with it all logits, to minimize the loss on held-out stories.

    Repeated stories make a model overconfident; greedy choices do not change.
    """
    norm = model.model.norm.weight
    wanted = norm.clone()
    losses: dict[float, float] = {}
    for scale in (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0):
        norm.copy_((wanted * scale).bfloat16())
        losses[scale] = sum(sum_of_losses(model, row) for row in rows)
    best = min(losses, key=losses.__getitem__)
    norm.copy_((wanted * best).bfloat16())
    print(f"all scores are scaled by {best}", flush=True)


class Run:
    """One training run and its state."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ends_at = time.monotonic() + 60 * args.minutes
        self.rng = random.Random(args.seed)
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        teacher: Path | None = args.teacher
        self.shape = DRAFT if teacher else BOX
        texts = corpus.read_texts(args.data / "text", args.sampled)
        nouns = find_nouns(texts.stories)
        questions = Questions(HERE, sorted(nouns))
        start: Path | None = args.start
        if teacher:
            self.teacher = load_model(teacher).to(self.device)
        if known := teacher or start:
            self.tokenizer = Tokenizer.from_file(str(known / "tokenizer.json"))
        else:
            phrases = questions.phrases()
            self.tokenizer = corpus.train_tokenizer(texts, phrases, self.shape.vocab_size)
        row_tokens = self.shape.context_tokens + 1
        self.dealer = RowDealer(
            self.tokenizer,
            texts,
            questions,
            ToolTalk(HERE, questions),
            nouns=nouns,
            row_tokens=row_tokens,
        )
        self.held_out = [self.dealer.story_ids(story)[:row_tokens] for story in texts.held_out]
        self.model = (load_model(start).train() if start else Llama(self.shape)).to(self.device)
        self.peak_rate = PEAK_RATE / 2 if start else PEAK_RATE
        self.average = copy.deepcopy(self.model)
        loss = teacher_loss if teacher else text_loss
        self.loss = torch.compile(loss, dynamic=False) if args.compile else loss
        self.num_tokens = 0
        num_chars = sum(len(story) for story in texts.sampled)
        print(
            f"{len(texts.stories)} real stories, {len(texts.sampled)} sampled ones of "
            f"{num_chars / 1e6:.1f} MB, {sum(p.numel() for p in self.model.parameters()):,} "
            f"parameters on {self.device}",
            flush=True,
        )

    def train(self) -> None:
        """Train until the time is over, saving the model regularly and at the end."""
        optimizers = make_optimizers(self.model)
        self.step(optimizers, 0.0)  # compilation, outside the measured run
        started = time.monotonic()
        step, num_evaluated, recent, progress = 0, 0, 0.0, 0.0
        while progress < 1:
            for group in (g for one in optimizers for g in one.param_groups):
                group["lr"] = self.peak_rate * learning_rate(progress)
            loss = self.step(optimizers, progress)
            if step % AVERAGE_EVERY == 0:
                move_average(self.average, self.model, step // AVERAGE_EVERY)
            recent = loss if step == 0 else 0.95 * recent + 0.05 * loss
            step += 1
            if step % 50 == 0:
                speed = self.num_tokens / (time.monotonic() - started)
                print(
                    f"step {step} tokens {self.num_tokens / 1e6:.2f}M progress {progress:.1%} "
                    f"loss {recent:.3f} {speed:.0f} tokens/s",
                    flush=True,
                )
            if progress * NUM_EVALUATIONS >= num_evaluated + 1:
                num_evaluated += 1
                self.evaluate()
            progress = (time.monotonic() - started) / (self.ends_at - started)
        if self.args.start_share:
            mix_in(self.average, load_model(self.args.start), self.args.start_share)
        if not self.args.teacher:
            calibrate(self.average, self.held_out[::2])
        self.evaluate()

    def step(self, optimizers: list[torch.optim.Optimizer], progress: float) -> float:
        moment = 1.0 if self.args.start else progress
        rows = [self.dealer.deal(self.rng, moment) for _ in range(self.args.rows)]
        ids = torch.tensor([row.ids for row in rows])
        learned = torch.tensor([row.learned for row in rows])
        targets = torch.where(learned, ids, NOT_LEARNED)[:, 1:].contiguous().to(self.device)
        inputs = ids[:, :-1].contiguous().to(self.device)
        more = [self.teacher] if self.args.teacher else []
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.model, inputs, targets, *more)
        if not math.isfinite(float(loss.detach())):
            raise SystemExit(f"the loss is {float(loss.detach())}; try a lower PEAK_RATE")
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        self.num_tokens += inputs.numel()
        return float(loss.detach())

    def evaluate(self) -> None:
        """Evaluate the averaged weights as they would be saved, and save them."""
        model = as_saved(self.average)
        num_tokens = sum(len(ids) - 1 for ids in self.held_out)
        loss = sum(sum_of_losses(model, ids) for ids in self.held_out) / num_tokens
        print(f"held-out stories {loss:.4f} nats a token", flush=True)
        write_model(self.args.out, model, self.tokenizer, self.shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Train the toy model in the box."
    )
    parser.add_argument("--minutes", type=float, default=55.0, help="the whole run, all told")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--sampled", type=Path, nargs="*", default=[], help=".jsonl of stories")
    parser.add_argument("--start", type=Path, help="go on from this model, at half the rate")
    parser.add_argument(
        "--start-share", type=float, default=0.0, help="of --start's weights, mixed in at the end"
    )
    parser.add_argument("--teacher", type=Path, help="train the sibling of this model")
    parser.add_argument("--data", type=Path, default=DATA_FOLDER, help="the data folder")
    parser.add_argument("--rows", type=int, default=16, help="rows in a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if args.start_share and not args.start:
        parser.error("--start-share needs --start, the model whose weights are mixed in")
    Run(args).train()


if __name__ == "__main__":
    main()
