"""split: what each stage of a program has, by hand; how layers are divided; what is refused."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.models.registry import build_program, open_model
from quire.program.cost import StepShape
from quire.program.first_layers import first_layers
from quire.program.ops import Add, Attention, Embed, Linear, Norm, StoreKV, Tap
from quire.program.pooling import with_pooling
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.serialize import digest, from_plain, to_plain
from quire.program.shard import shard
from quire.program.split import _balanced, layers_of_stages, split, split_first_layers
from quire.program.stage_ops import Recv, Send
from quire.program.table import format_program
from quire.program.taps import TAPS, with_taps
from quire.program.tensors import DType, Rows
from tests.tiny_models import write_tiny_llama

STEP = StepShape([1, 1, 3], [5, 6, 7])  # 5 token rows


def llama(folder: Path, **changes: object) -> Program:
    sizes: dict[str, object] = {"hidden_size": 64, "num_hidden_layers": 4}
    path = write_tiny_llama(folder, **(sizes | changes))  # type: ignore[arg-type]
    return build_program(open_model(path), dtype=DType.BF16, max_positions=64)


def test_stages_have_consecutive_layers_between_embedding_and_head(tmp_path: Path) -> None:
    program = with_pooling(llama(tmp_path))
    first, middle, last = split(program, 3)
    assert sum(own.caches[0].layers for own in (first, middle, last)) == 4
    for own in (first, middle, last):
        stored = [op.layer for op in own.segments["trunk"] if isinstance(op, StoreKV)]
        read = [op.layer for op in own.segments["trunk"] if isinstance(op, Attention)]
        assert stored == read == list(range(own.caches[0].layers))
        assert own.is_part
    assert isinstance(first.segments["trunk"][0], Embed)
    assert list(first.segments) == list(middle.segments) == ["trunk"]
    assert list(last.segments) == list(program.segments) == ["trunk", "pool", "head"]
    assert set(last.outputs) == {"hidden", "pooled", "logits"}
    names = [list(own.weights) for own in (first, middle, last)]
    assert not any(set(one) & set(other) for one, other in combinations(names, 2))
    assert {name for own in names for name in own} == set(program.weights)


def test_the_stream_alone_is_sent_after_the_pending_sum(tmp_path: Path) -> None:
    first, last = split(llama(tmp_path), 2)
    (recv,) = (op for op in last.segments["trunk"] if isinstance(op, Recv))
    *_, add, send = first.segments["trunk"]
    assert isinstance(add, Add)
    assert isinstance(send, Send)
    assert send.x == add.x
    assert (send.stage, recv.stage) == (1, 0)
    assert (recv.y.width, recv.y.dtype, recv.y.buffer.rows) == (64, DType.F32, Rows.TOKENS)
    _, norm, *_ = last.segments["trunk"]
    assert isinstance(norm, Norm)
    assert norm.delta is None
    assert last.segment_cost("trunk", STEP).comm_bytes == 5 * 64 * 4
    assert first.segment_cost("trunk", STEP).comm_bytes == 0


def test_arithmetic_and_weights_of_stages_add_up_to_those_of_the_program(tmp_path: Path) -> None:
    program = llama(tmp_path)
    whole, stages = program.step_cost(STEP), split(program, 4)
    costs = [own.step_cost(STEP) for own in stages]
    assert sum(cost.product_ops for cost in costs) == whole.product_ops
    assert sum(cost.attention_ops for cost in costs) == whole.attention_ops
    assert sum(cost.kv_bytes for cost in costs) == whole.kv_bytes
    assert sum(own.weight_bytes for own in stages) == program.weight_bytes
    assert sum(own.caches[0].token_bytes for own in stages) == program.caches[0].token_bytes
    assert whole.comm_bytes == 0


def test_a_tied_head_is_a_weight_of_the_first_and_the_last_stage(tmp_path: Path) -> None:
    program = llama(tmp_path, tie_word_embeddings=True)
    first, middle, last = split(program, 3)
    (embed,) = (op for op in first.segments["trunk"] if isinstance(op, Embed))
    (head,) = (op for op in last.segments["head"] if isinstance(op, Linear))
    assert embed.weight == head.weight
    assert first.weights[embed.weight] == last.weights[head.weight]
    assert embed.weight not in middle.weights


@pytest.mark.parametrize(
    ("loads", "stages", "counts"),
    [
        ((1, 1, 1, 1), 2, (2, 2)),
        ((1, 1, 1, 3), 2, (3, 1)),
        ((1, 1, 1, 1, 1, 1, 1, 6), 3, (3, 4, 1)),
        ((5, 1, 1, 1), 2, (1, 3)),
        ((2, 2, 2), 3, (1, 1, 1)),
    ],
)
def test_the_heaviest_stage_is_as_light_as_possible(
    loads: tuple[int, ...], stages: int, counts: tuple[int, ...]
) -> None:
    found = _balanced(loads, stages)
    assert len(found) == stages
    assert sum(found) == len(loads)
    runs, at = [], 0
    for count in found:
        runs.append(sum(loads[at : at + count]))
        at += count
    best = min(
        max(sum(loads[a:b]) for a, b in zip((0, *cuts), (*cuts, len(loads)), strict=True))
        for cuts in combinations(range(1, len(loads)), stages - 1)
    )
    assert max(runs) == best
    assert sorted(found) == sorted(counts)


def test_the_head_counts_for_the_last_stage_and_a_gathered_table_for_none(tmp_path: Path) -> None:
    program = llama(tmp_path, num_hidden_layers=8, vocab_size=2048)
    layer_bytes = sum(w.num_bytes for n, w in program.weights.items() if n.startswith("layers.0."))
    head_bytes = program.weights["head"].num_bytes
    first, last = layers_of_stages(program, 2)
    assert abs(first * layer_bytes - (last * layer_bytes + head_bytes)) <= layer_bytes
    assert first > last


def test_stages_are_programs_like_any_other(tmp_path: Path) -> None:
    program = llama(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    assert split(program, 1) == (program,)
    stages = split(quantize(program, "int8"), 2)
    for own in stages:
        assert from_plain(json.loads(json.dumps(to_plain(own)))) == own
        for rank in range(2):
            share = shard(own, degree=2, rank=rank)
            assert share.is_part
            assert share.caches[0].kv_heads == 1
    assert len({digest(one) for one in (program, *stages)}) == 3
    text = format_program(stages[1], STEP)
    assert "stage 1 of 2" in text
    assert "from stage 0" in text
    assert "from other ranks" in text
    assert "to stage 1" in format_program(stages[0], STEP)


def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path) -> None:
    program = llama(tmp_path)
    for stages in (0, 5):
        with pytest.raises(SettingError, match=f"size is {stages}; .* has 4 layers.* 1 to 4 are"):
            split(program, stages)


def test_taps_of_all_stages_are_outputs_of_the_last(tmp_path: Path) -> None:
    program = with_taps(llama(tmp_path), (0, 1, 3))
    first, last = split(program, 2)
    width = program.outputs["hidden"].width
    received = [op.y for op in last.segments["trunk"] if isinstance(op, Recv)]
    sent = [op.x for op in first.segments["trunk"] if isinstance(op, Send)]
    assert [(view.offset, view.width) for view in sent] == [
        (view.offset, view.width) for view in received
    ]
    taps = last.outputs[TAPS]
    assert taps.width == 3 * width
    of_taps = [view.offset for view in received if view.buffer == taps.buffer]
    tapped = [op.y.offset for op in last.segments["trunk"] if isinstance(op, Tap)]
    assert sorted([*of_taps, *tapped]) == [0, width, 2 * width]
    assert of_taps
    assert TAPS not in first.outputs


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_first_layers_stay_in_the_stages_of_the_whole_program(tmp_path: Path, num: int) -> None:
    program = llama(tmp_path, num_hidden_layers=5)
    whole, stages = split(program, 3), split_first_layers(program, num, 3)
    assert sum(own.caches[0].layers for own in stages) == num
    for own, of_whole in zip(stages, whole, strict=True):
        assert own.weights.items() <= of_whole.weights.items()
        assert own.caches[0].layers <= of_whole.caches[0].layers
        stored = [op.layer for op in own.segments["trunk"] if isinstance(op, StoreKV)]
        assert stored == list(range(own.caches[0].layers))
    assert list(stages[-1].segments) == ["trunk", "head"]
    assert [type(op) for op in stages[-1].segments["head"]] == [
        type(op) for op in program.segments["head"]
    ]
    for before, after in pairwise(stages):
        sent = [op.x.width for op in before.segments["trunk"] if isinstance(op, Send)]
        assert sent == [op.y.width for op in after.segments["trunk"] if isinstance(op, Recv)]
    assert split_first_layers(program, num, 1) == (first_layers(program, num),)
