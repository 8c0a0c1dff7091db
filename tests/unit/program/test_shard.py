"""shard: what each rank of a program has, by hand; what is refused; printed text and bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.models.registry import build_program, open_model
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.cost import StepShape
from quire.program.expert_ops import Experts
from quire.program.ops import Attention, Linear
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.row_parallel import TpMode
from quire.program.serialize import digest, from_plain, to_plain
from quire.program.shard import shard
from quire.program.table import format_program
from quire.program.tensors import DType
from tests.cases import each_case
from tests.models.cases_experts import MIXTRAL
from tests.models.cases_gpt2 import BASE as GPT2
from tests.tiny_models import write_tiny, write_tiny_llama


def llama(folder: Path, **changes: object) -> Program:
    path = write_tiny_llama(
        folder,
        **(
            {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2} | changes  # type: ignore[arg-type]
        ),
    )
    return build_program(open_model(path), dtype=DType.BF16, max_positions=64)


@each_case("width", [1, 5, 32, 33, 64, 97, 130])
@each_case("unit", [1, 16, 32])
def test_shares_tile_the_columns_in_order(width: int, unit: int) -> None:
    for degree in range(1, -(-width // unit) + 1):
        shares = [share_of(width, unit, rank, degree) for rank in range(degree)]
        assert [0, *(end for _, end in shares)] == [*(start for start, _ in shares), width]
        assert all(start < end for start, end in shares)
        assert all(start % unit == 0 for start, _ in shares)


def test_a_rank_has_its_rows_of_every_tensor(tmp_path: Path) -> None:
    program = llama(tmp_path)
    for rank, (gate, rest) in enumerate([((0, 64), 64), ((64, 33), 32)]):
        own = shard(program, degree=2, rank=rank)
        weight = own.weights["layers.0.qkv"]
        assert [(p.name, p.first_row, p.rows, p.of_rows) for p in weight.parts] == [
            ("q", 32 * rank, 32, 64),
            ("k", 16 * rank, 16, 32),
            ("v", 16 * rank, 16, 32),
        ]
        first, rows = gate
        weight = own.weights["layers.0.gate_up"]
        assert [(p.first_row, p.rows) for p in weight.parts] == [(first, rows), (first, rows)]
        assert own.weights["layers.0.o"].rows == rest
        assert own.weights["layers.0.down"].rows == rest
        assert own.caches[0].kv_heads == 1
        assert own.source_shapes() == program.source_shapes()


@pytest.mark.parametrize("degree", [2, 4])
def test_shares_name_the_outputs_of_the_undivided_weight(degree: int, tmp_path: Path) -> None:
    program = llama(tmp_path, tie_word_embeddings=False, num_key_value_heads=1)
    whole = {op.weight: program.weights[op.weight].rows for op in products_of(program)}
    for rank in range(degree):
        own = shard(program, degree=degree, rank=rank)
        for op in products_of(own):
            source = next(name for name in whole if op.weight.startswith(name))
            assert own.weights[op.weight].undivided_rows == whole[source]
            assert own.weights[op.weight].rows < whole[source]
        assert from_plain(json.loads(json.dumps(to_plain(own)))) == own
    assert not any(weight.whole_rows for weight in program.weights.values())


def products_of(program: Program) -> list[Linear]:
    return [op for op in program.operations() if isinstance(op, Linear)]


def test_a_layer_exchanges_four_times_and_splits_no_sum(tmp_path: Path) -> None:
    program = llama(tmp_path)
    own = shard(program, degree=2, rank=1)
    trunk = own.segments["trunk"]
    gathers = [op.x.buffer.name.split(".")[0] for op in trunk if isinstance(op, AllGather)]
    assert gathers == ["residual", *["attended", "o", "activated", "down"] * 2]
    columns = {
        op.weight: program.weights[op.weight].columns for op in trunk if isinstance(op, Linear)
    }
    assert {name: own.weights[name].columns for name in columns} == columns
    step = StepShape([1, 1, 1], [5, 6, 7])
    # attended 64 of 2 ranks, o and down 96, activated 97: columns of the other rank, in bf16; of
    # the embedding 96, in f32.
    layers_bytes = 2 * 3 * 2 * (32 + 64 + 64 + 64)
    assert own.segment_cost("trunk", step).comm_bytes == layers_bytes + 3 * 4 * 64
    whole = program.segment_cost("trunk", step)
    both = sum(
        shard(program, degree=2, rank=rank).segment_cost("trunk", step).product_ops
        for rank in range(2)
    )
    assert both == whole.product_ops
    assert whole.comm_bytes == 0


def test_fewer_kv_heads_than_ranks_are_held_by_several(tmp_path: Path) -> None:
    program = llama(tmp_path)
    firsts = []
    for rank in range(4):
        own = shard(program, degree=4, rank=rank)
        (attention, *_) = (op for op in own.segments["trunk"] if isinstance(op, Attention))
        assert (attention.heads, attention.kv_heads) == (1, 1)
        q, k, _ = own.weights["layers.0.qkv"].parts
        assert q.first_row == 16 * rank
        firsts.append(k.first_row)
    assert firsts == [0, 0, 16, 16]


@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_are_looked_up_in_columns_and_a_tied_head_has_rows(
    is_tied: bool, tmp_path: Path
) -> None:
    program = llama(tmp_path, tie_word_embeddings=is_tied)
    weights = [shard(program, degree=2, rank=rank).weights for rank in range(2)]
    assert [(own["embed"].rows, own["embed"].columns) for own in weights] == [(307, 64), (307, 32)]
    assert [own["embed"].parts[0].first_column for own in weights] == [0, 64]
    own = shard(program, degree=2, rank=0)
    (head,) = (op for op in own.segments["head"] if isinstance(op, Linear))
    assert (own.weights[head.weight].rows, own.weights[head.weight].columns) == (160, 96)
    assert isinstance(own.segments["head"][-1], AllGather)
    # Both ranks together have each byte of the embedding once, and of a tied head once more.
    num_bytes = sum(own[name].num_bytes for own in weights for name in {"embed", head.weight})
    assert num_bytes == 2 * 2 * 307 * 96


def test_an_embedding_of_integers_and_one_of_positions_stay_whole(tmp_path: Path) -> None:
    """The scale of an integer is that of its row; tables of positions are small."""
    tied = quantize(llama(tmp_path / "tied", tie_word_embeddings=True), "int8")
    own = shard(tied, degree=2, rank=0)
    assert own.weights["embed"] == tied.weights["embed"]
    assert own.weights["embed.share"].rows == 160
    folder = write_tiny(tmp_path / "gpt2", GPT2 | {"vocab_size": 307}, seed=1)
    gpt2 = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    own = shard(gpt2, degree=5, rank=1)
    assert own.weights["positions"] == gpt2.weights["positions"]
    assert own.weights["embed"].columns < gpt2.weights["embed"].columns


def test_shares_of_a_rank_are_programs_like_any_other(tmp_path: Path) -> None:
    program = llama(tmp_path)
    assert shard(program, degree=1, rank=0) is program
    shares = [shard(program, degree=2, rank=rank) for rank in range(2)]
    for own in shares:
        assert from_plain(json.loads(json.dumps(to_plain(own)))) == own
    assert len({digest(one) for one in (program, *shares)}) == 3
    text = format_program(shares[1], StepShape([1], [3]))
    assert "32 of 64 columns from rank 1 of 2" in text
    assert "received" in text
    assert "from other ranks" in text
    assert "received" not in format_program(program, StepShape([1], [3]))


@pytest.mark.parametrize(
    ("degree", "words"),
    [
        (
            3,
            "4 heads over 2 KV heads.*degrees work: 1, 2, 4; context_parallel_size divides",
        ),
        (0, "1 to 64"),
        (65, "1 to 64"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(tmp_path: Path, degree: int, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        shard(llama(tmp_path), degree=degree, rank=0)


def test_fast_products_are_split_by_inputs_and_summed(tmp_path: Path) -> None:
    program = llama(tmp_path)
    step = StepShape([1, 1, 1], [5, 6, 7])
    shares = [shard(program, degree=2, rank=rank, mode=TpMode.FAST) for rank in range(2)]
    for rank, own in enumerate(shares):
        trunk = own.segments["trunk"]
        assert [op.x.buffer.name.split(".")[0] for op in trunk if isinstance(op, AllReduce)] == [
            *("o", "down"),
            *("o", "down"),
        ]
        assert [op.x.buffer.name for op in trunk if isinstance(op, AllGather)] == ["residual.0"]
        assert own.weights["layers.0.o"].columns == 32
        down = own.weights["layers.0.down"]
        assert (down.rows, down.columns) == (96, 64 if rank == 0 else 33)
        assert {(p.first_column, p.of_columns) for p in down.parts} == {(64 * rank, 97)}
        assert own.source_shapes() == program.source_shapes()
        assert from_plain(json.loads(json.dumps(to_plain(own)))) == own
        # o and down, 96 columns of which a rank adds up 64 and 32: those of the other rank, and
        # then the other's sums; in bf16. Of the embedding the other's columns, in f32.
        layers_bytes, columns = 2 * 3 * 2 * 2 * 96, 32 if rank == 0 else 64
        assert own.segment_cost("trunk", step).comm_bytes == layers_bytes + 3 * 4 * columns
    products = sum(one.segment_cost("trunk", step).product_ops for one in shares)
    assert products == program.segment_cost("trunk", step).product_ops
    assert "sum of 2 ranks, in their order" in format_program(shares[1], step)


def test_groups_of_integers_are_not_divided(tmp_path: Path) -> None:
    program = quantize(llama(tmp_path), "int4-g128")
    with pytest.raises(SettingError, match=r"integers in groups of 128 columns.*tp-mode exact"):
        shard(program, degree=2, rank=0, mode=TpMode.FAST)


def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path) -> None:
    program = llama(tmp_path / "llama")
    with pytest.raises(SettingError, match="rank is 2; 0 to 1"):
        shard(program, degree=2, rank=2)
    with pytest.raises(SettingError, match="kept in fp8"):
        shard(quantize(program, "fp8"), degree=2, rank=0)


def test_experts_are_split_by_outputs_and_routers_stay_whole(tmp_path: Path) -> None:
    folder = write_tiny(
        tmp_path / "mixtral", MIXTRAL | {"vocab_size": 307, "max_position_embeddings": 64}, seed=1
    )
    mixtral = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    routers = [name for name in mixtral.weights if name.endswith("router")]
    for rank in range(5):
        own = shard(mixtral, degree=5, rank=rank)
        assert all(own.weights[name] == mixtral.weights[name] for name in routers)
        assert own.weights["layers.0.experts.gate_up"].experts == 8
        assert own.weights["layers.0.experts.gate_up"].expert_rows == 2 * 9
        assert own.weights["layers.0.experts.down"].expert_rows == 12
    step = StepShape([1], [0])
    (experts,) = (op for op in own.segments["trunk"][:20] if isinstance(op, Experts))
    # Of two chosen experts, the inner columns of the other four ranks.
    assert experts.cost(own, step).comm_bytes == 2 * 36 * 4
