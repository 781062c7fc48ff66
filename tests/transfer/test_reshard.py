"""The plan of pieces, for any pair of degrees: every destination cell once, from a source that has it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdserve.core.errors import TransferError
from jdserve.transfer.layout import KVLayout
from jdserve.transfer.reshard import plan_pieces, shards


def layout(layers=4, kv_heads=2, tp=1, pp=1, **other):
    fields = {"head_dim": 8, "page_size": 16, "dtype": "float32"} | other
    return KVLayout(layers=layers, kv_heads=kv_heads, tp=tp, pp=pp, **fields)


def fits(tp, kv_heads):
    return tp % kv_heads == 0 or kv_heads % tp == 0


@st.composite
def layout_pairs(draw):
    layers, kv_heads = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    tps = st.sampled_from([tp for tp in range(1, 17) if fits(tp, kv_heads)])
    pps = st.sampled_from([pp for pp in range(1, layers + 1) if layers % pp == 0])
    return tuple(layout(layers, kv_heads, draw(tps), draw(pps)) for _ in range(2))


def stored_cells(of):
    """By (stage, rank): the (layer, head) of the model in each cell of the device's shard."""
    layers = of.layers // of.pp
    stored = [head for head in range(of.kv_heads) for _ in range(max(1, of.tp // of.kv_heads))]
    per_device = len(stored) // of.tp
    return {
        (stage, rank): [
            [(stage * layers + layer, head) for head in stored[rank * per_device : (rank + 1) * per_device]]
            for layer in range(layers)
        ]
        for stage in range(of.pp)
        for rank in range(of.tp)
    }


@given(layout_pairs())
@settings(deadline=None, max_examples=300)
def test_every_cell_comes_once_from_a_device_that_holds_it(pair):
    source, destination = pair
    held, wanted = stored_cells(source), stored_cells(destination)
    arrived = {device: {} for device in wanted}
    for piece in plan_pieces(source, destination):
        cells = arrived[piece.destination]
        for down, layer in enumerate(piece.source_layers):
            for right, head in enumerate(piece.source_heads):
                at = (piece.layer + down, piece.head + right)
                assert at not in cells, "covered twice"
                cells[at] = held[piece.source][layer][head]
    for device, rows in wanted.items():
        assert arrived[device] == {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}


@given(layout_pairs())
@settings(deadline=None, max_examples=100)
def test_pieces_come_in_the_order_in_which_they_are_joined(pair):
    """By destination device, then rows of equal layers, then heads."""
    pieces = plan_pieces(*pair)
    order = [(piece.destination, piece.layer, piece.head) for piece in pieces]
    assert order == sorted(order)
    rows = {}
    for piece in pieces:
        rows.setdefault((piece.destination, piece.layer), set()).add(len(piece.source_layers))
    assert all(len(heights) == 1 for heights in rows.values())


@given(layout_pairs())
@settings(deadline=None, max_examples=200)
def test_copies_of_a_head_take_turns(pair):
    """Devices that hold the same box send equally many pieces, give or take one."""
    source, destination = pair
    sent = Counter(piece.source for piece in plan_pieces(source, destination))
    boxes = {}
    for shard in shards(source):
        boxes.setdefault((shard.layers, shard.heads), []).append(sent[shard.stage, shard.rank])
    assert all(max(counts) - min(counts) <= 1 for counts in boxes.values())


@given(layout_pairs())
@settings(deadline=None, max_examples=100)
def test_equal_layouts_move_whole_shards(pair):
    source = pair[0]
    pieces = plan_pieces(source, source)
    assert len(pieces) == source.tp * source.pp
    per_device = source.stored_kv_heads // source.tp
    assert all(piece.source_layers == range(source.layers // source.pp) for piece in pieces)
    assert all(piece.source_heads == range(per_device) for piece in pieces)


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 8), ("kv_heads", 4), ("head_dim", 16), ("page_size", 32), ("dtype", "bfloat16")]
)
def test_other_models_are_refused(field, value):
    with pytest.raises(TransferError, match=f"differ in {field}: {value} at the source"):
        plan_pieces(layout(**{field: value}), layout())


def test_page_bytes_count_each_head_once():
    assert layout(tp=1).page_bytes() == layout(tp=8).page_bytes() == 2 * 4 * 2 * 16 * 8 * 4
    assert layout(dtype="bfloat16").page_bytes() == 2 * 4 * 2 * 16 * 8 * 2
