"""Trains the toy model in the box and writes it in the Hugging Face layout.

A Llama of some three million parameters, trained in float32 (products in bfloat16) and saved in
bfloat16. Books come first and fade; stories stay. The weights that ship are a running average,
taken whenever the loss on held-out stories is the lowest so far.

Does not know the serving engine: it needs PyTorch, which the engine does not. Always holds: after
the first evaluation a whole, loadable model lies in the output folder; the order of the data
depends on the seed alone.
"""

import argparse
import copy
import json
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import corpus
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA_FOLDER = Path(os.environ.get("QUIRE_DATA", ROOT.parent / "shared" / "data"))

ROWS_PER_STEP = 4
PEAK_RATE = 3e-3
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 100
BOOK_SHARE = (0.5, 0.1)  # of the rows, at the start and at the end
AVERAGE_DECAY = 0.995
NUM_EVALUATIONS = 16

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('role is ' + message['role'] + '; allowed: system, user, assistant') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model."""

    vocab_size: int = 2048
    hidden: int = 256
    ffn: int = 640
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    context_tokens: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.1


# Shapes below: B rows, T tokens, C hidden, H heads, G KV heads, D head dimension, V vocabulary.
# Module names are the names of the weights in the file, so they follow Hugging Face's Llama.


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped KV heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), rope)  # [B, H, T, D]
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), rope)  # [B, G, T, D]
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer; dropout only while training."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = shape.dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rope)
        x = x + F.dropout(attended, self.dropout, self.training)
        fed = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(fed, self.dropout, self.training)


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class Llama(nn.Module):
    """The language model; its head is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self.rope = rope_table(shape)
        self.dropout = shape.dropout
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.num_layers) if into_residual else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores [B, T, V] for the token after each of `ids` [B, T]."""
        rope = (self.rope[0][: ids.shape[1]], self.rope[1][: ids.shape[1]])
        x = F.dropout(self.model.embed_tokens(ids), self.dropout, self.training)  # [B, T, C]
        for layer in self.model.layers:
            x = layer(x, rope)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D], the two halves of a head turning together."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context_tokens), shape.rope_theta**-steps)
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each head of x [B, H, T, D] by its position."""
    low, high = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat([-high, low], dim=-1) * rope[1]).to(x.dtype)


def row_loss(model: Llama, rows: Tensor) -> Tensor:
    """Mean loss of rows [B, T + 1], in nats a token; ids below zero are padding."""
    scores = model(rows[:, :-1].clamp(min=0))
    return F.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-1)


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms.

    Muon learns to look back at the prompt in far fewer steps than AdamW alone.
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


def learning_rate(step: int, progress: float) -> float:
    """Warm up, then fall along a cosine to a twentieth."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_RATE * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def move_average(average: Llama, model: Llama, step: int) -> None:
    decay = min(AVERAGE_DECAY, (1 + step) / (10 + step))
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(weight, 1 - decay)


def as_saved(model: Llama) -> Llama:
    """The model as a reader of the file will see it: every weight rounded to bfloat16."""
    rounded = copy.deepcopy(model).eval()
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    return rounded


@torch.no_grad()
def held_out_loss(model: Llama, rows: list[list[int]]) -> float:
    """Mean loss over every token of the held-out stories, one story a row."""
    total, num_tokens = 0.0, 0
    for row in rows:
        ids = torch.tensor([row])
        total += float(row_loss(model, ids)) * (len(row) - 1)
        num_tokens += len(row) - 1
    return total / num_tokens


@torch.no_grad()
def tell(model: Llama, tokenizer: Tokenizer, request: str, *, seed: int) -> str:
    """Answer one request at temperature 0.7, for the model card."""
    generator = torch.Generator().manual_seed(seed)
    prompt = f"<|user|>{request}{corpus.END}<|assistant|>"
    ids: list[int] = tokenizer.encode(prompt).ids
    start, end = len(ids), corpus.token_id(tokenizer, corpus.END)
    while len(ids) < 400:
        scores = model(torch.tensor([ids]))[0, -1]
        chances = torch.softmax(scores / 0.7, dim=-1)
        next_id = int(torch.multinomial(chances, 1, generator=generator))
        if next_id == end:
            break
        ids.append(next_id)
    text: str = tokenizer.decode(ids[start:])
    return text.strip()


def write_model(out: Path, model: Llama, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write weights, configuration and tokenizer; the weights appear whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().bfloat16().contiguous() for name, w in model.named_parameters()}
    save_file(weights, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "model.safetensors.part").replace(out / "model.safetensors")
    ends = {
        "bos_token_id": corpus.token_id(tokenizer, corpus.BEGIN),
        "eos_token_id": corpus.token_id(tokenizer, corpus.END),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.BEGIN,
        "eos_token": corpus.END,
        "model_max_length": shape.context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    defaults = {**ends, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    write_json(out / "config.json", config)
    write_json(out / "tokenizer_config.json", tokenizer_config)
    write_json(out / "generation_config.json", defaults)
    tokenizer.save(str(out / "tokenizer.json"))
    for path in out.iterdir():
        path.chmod(0o644)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class Run:
    """One training run: what it has, and what it has reached."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.monotonic()
        self.rng = random.Random(args.seed)
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        self.shape = Shape()
        texts = corpus.read_texts(args.data / "text")
        asks = corpus.read_asks(HERE / "small_talk.json")
        self.tokenizer = corpus.train_tokenizer(texts, asks, self.shape.vocab_size)
        row_tokens = self.shape.context_tokens + 1
        self.dealer = corpus.RowDealer(self.tokenizer, texts, asks=asks, row_tokens=row_tokens)
        held_out = [self.dealer.story_ids(story)[:row_tokens] for story in texts.held_out]
        self.held_out = held_out
        self.bytes_per_token = sum(len(s.encode()) for s in texts.held_out) / sum(
            len(row) - 1 for row in held_out
        )
        self.model = Llama(self.shape)
        self.average = copy.deepcopy(self.model)
        self.num_tokens = 0
        self.best = math.inf

    def progress(self) -> float:
        """How far the run is, from 0 to 1: the nearer of its two limits counts."""
        limit_minutes: float = self.args.minutes
        limit_tokens: float = self.args.tokens * 1e6
        minutes = (time.monotonic() - self.started) / 60
        return max(self.num_tokens / limit_tokens, minutes / limit_minutes)

    def train(self) -> None:
        """Train until a limit is reached, writing the best model on the way."""
        optimizers = make_optimizers(self.model)
        step, num_evaluated, recent = 0, 0, 0.0
        while (progress := self.progress()) < 1:
            for group in (g for one in optimizers for g in one.param_groups):
                group["lr"] = learning_rate(step, progress)
            loss = self.step(optimizers, progress)
            move_average(self.average, self.model, step)
            recent = loss if step == 0 else 0.95 * recent + 0.05 * loss
            step += 1
            if step % 50 == 0:
                self.report(step, recent)
            if progress * NUM_EVALUATIONS >= num_evaluated + 1:
                num_evaluated += 1
                self.evaluate()
        self.evaluate()

    def step(self, optimizers: list[torch.optim.Optimizer], progress: float) -> float:
        first, last = BOOK_SHARE
        book_share = first + (last - first) * progress
        rows = [self.dealer.deal(self.rng, book_share=book_share) for _ in range(ROWS_PER_STEP)]
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.args.exact):
            loss = row_loss(self.model, torch.tensor(rows))
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        self.num_tokens += sum(len(row) - 1 for row in rows)
        return float(loss.detach())

    def report(self, step: int, loss: float) -> None:
        seconds, progress = time.monotonic() - self.started, self.progress()
        print(
            f"step {step} tokens {self.num_tokens / 1e6:.2f}M progress {progress:.0%} "
            f"loss {loss:.3f} eta {seconds * (1 - progress) / progress:.0f}s",
            flush=True,
        )

    def evaluate(self) -> None:
        """Measure the average as it would be saved; write it if none was better."""
        model = as_saved(self.average)
        loss = held_out_loss(model, self.held_out)
        print(f"held-out loss {loss:.4f} best so far {min(loss, self.best):.4f}", flush=True)
        if loss >= self.best:
            return
        self.best = loss
        write_model(self.args.out, model, self.tokenizer, self.shape)
        request = "Tell me a story about a dog."
        card = (HERE / "card.md").read_text()
        facts = {
            "loss": f"{loss:.3f}",
            "bits": f"{loss / math.log(2) / self.bytes_per_token:.3f}",
            "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
            "tokens": f"{self.num_tokens / 1e6:.1f}",
            "minutes": f"{(time.monotonic() - self.started) / 60:.0f}",
            "seed": str(self.args.seed),
            "request": request,
            "sample": tell(model, self.tokenizer, request, seed=1).replace("\n", "\n> "),
        }
        (self.args.out / "README.md").write_text(card.format(**facts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the toy model in the box.")
    parser.add_argument("--minutes", type=float, default=45.0, help="stop after this long")
    parser.add_argument("--tokens", type=float, default=6.5, help="stop after so many millions")
    parser.add_argument("--out", type=Path, default=ROOT / "quire" / "models" / "box")
    parser.add_argument("--data", type=Path, default=DATA_FOLDER, help="the data folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="products in float32 too")
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
