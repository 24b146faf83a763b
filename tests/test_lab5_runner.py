"""Lab 5's model runner: ragged batches and padded decode steps against the plain decoder, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from serving_runs import BLOCK_SIZE, held, request, right_logits, tiny_model

from solutions.lab5_serving import BlockManager, Chunk, ModelRunner, Request, Step
from solutions.lab5_serving.batch import ALIGNMENT, Layout, Staging, TableRows, assemble, table_width
from solutions.lab5_serving.cuda_graphs import STEP, StepGraphs, bucket, buckets
from solutions.lab5_serving.drafts import DraftedRequest

# ---- ragged steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["last", "all"])
def test_a_ragged_step_gives_each_request_the_logits_that_it_has_alone(rows):
    model, manager = tiny_model(), BlockManager(40, BLOCK_SIZE)
    runner = ModelRunner(model, 40, BLOCK_SIZE)
    long, short, one = requests = request("long", 23), request("short", 6), request("one", 1)
    held(manager, *requests)
    first = runner.run(Step([Chunk(long, 0, 9), Chunk(short, 0, 6)]), manager, rows)
    second = runner.run(Step([Chunk(short, 5, 1), Chunk(long, 9, 14), Chunk(one, 0, 1)]), manager, rows)
    full = {each.id: right_logits(model, each.tokens) for each in requests}
    if rows == "last":  # the first chunk of the long request does not end it
        wanted = full["short"][-1:], torch.stack([full[id][-1] for id in ("short", "long", "one")])
    else:
        wanted = torch.cat((full["long"][:9], full["short"])), torch.cat((full["short"][5:], full["long"][9:]))
        wanted = wanted[0], torch.cat((wanted[1], full["one"]))
    for found, right in zip((first, second), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_a_draft_is_verified_by_the_logits_behind_each_of_its_tokens():
    model, manager = tiny_model(), BlockManager(40, BLOCK_SIZE)
    runner = ModelRunner(model, 40, BLOCK_SIZE)
    drafted, plain = DraftedRequest("drafted", request("drafted", 7).prompt), request("plain", 5)
    held(manager, drafted, plain)
    runner.run(Step([Chunk(drafted, 0, 6)]), manager)
    drafted.draft = [3, 1, 4]
    manager.append("drafted", drafted.draft)
    found = runner.run(Step([Chunk(drafted, 6, 4), Chunk(plain, 0, 5)]), manager)
    right = right_logits(model, drafted.tokens + drafted.draft)[-4:], right_logits(model, plain.tokens)[-1:]
    torch.testing.assert_close(found, torch.cat(right), rtol=1e-4, atol=1e-4)


def test_copied_blocks_serve_a_fork_in_every_layer():
    model, manager = tiny_model(), BlockManager(40, BLOCK_SIZE)
    runner = ModelRunner(model, 40, BLOCK_SIZE, fused=False)
    parent = request("parent", 6)
    held(manager, parent)
    runner.run(Step([Chunk(parent, 0, 6)]), manager)
    child = Request("child", [*parent.tokens, 17])
    manager.fork("parent", "child")
    copies = manager.append("child", [17])
    assert len(copies) == 1  # the block that both would write
    found = runner.run(Step([Chunk(child, 6, 1)], copies=copies), manager)
    torch.testing.assert_close(found, right_logits(model, child.tokens)[-1:], rtol=1e-4, atol=1e-4)
    parent.tokens.append(30)
    manager.append("parent", [30])
    found = runner.run(Step([Chunk(parent, 6, 1)]), manager)
    torch.testing.assert_close(found, right_logits(model, parent.tokens)[-1:], rtol=1e-4, atol=1e-4)


def test_a_chunk_that_its_request_does_not_have_is_refused():
    runner, manager = ModelRunner(tiny_model(), 8, BLOCK_SIZE), BlockManager(8, BLOCK_SIZE)
    short = request("short", 6)
    held(manager, short)
    with pytest.raises(ValueError, match="request 'short' has 6 tokens, a chunk wants 5 to 7"):
        runner.run(Step([Chunk(short, 5, 2)]), manager)
    with pytest.raises(ValueError, match="rows must be one of last, all, got 'none'"):
        runner.run(Step([Chunk(short, 0, 6)]), manager, rows="none")
    assert runner.run(Step(), manager).shape == (0, 61)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
        ({"block_size": True}, "block_size must be an integer of at least 1, got True"),
        ({"attention": "flash"}, "attention must be one of triton, torch, got 'flash'"),
    ],
)
def test_a_runner_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelRunner(tiny_model(layers=1), **({"num_blocks": 8} | settings))


# ---- what crosses to the device --------------------------------------------------------------------------------------


def test_tables_follow_every_change_of_a_row():
    tables = TableRows()
    assert tables.update([[1, 2], [3]])[:, :2].tolist() == [[1, 2], [3, 0]]
    moved = tables.update([[3, 4], [7, 8, 9], [5]])  # the first left, the others moved up and grew
    assert [moved[0, :2].tolist(), moved[1, :3].tolist(), moved[2, :1].tolist()] == [[3, 4], [7, 8, 9], [5]]
    swapped = [3, 6]  # the last block was copied before it was written: of the same length
    assert tables.update([swapped])[0, :2].tolist() == [3, 6]
    swapped[1] = 11
    assert tables.update([swapped])[0, :2].tolist() == [3, 11]
    wide = tables.update([list(range(ALIGNMENT + 1))])
    assert wide.shape == (1, 2 * ALIGNMENT) and wide[0, ALIGNMENT] == ALIGNMENT
    assert [table_width(blocks) for blocks in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


def test_arrays_are_packed_apart_and_come_back_the_same():
    manager = BlockManager(40, BLOCK_SIZE)
    requests = request("a", 9), request("b", 5)
    held(manager, *requests)
    arrays, decode = assemble([Chunk(requests[0], 2, 7), Chunk(requests[1], 0, 3)], manager, TableRows())
    assert not decode
    layout = Layout.of(arrays)
    batch = layout.unpack(Staging(torch.device("cpu")).send(arrays, layout), decode)
    assert {place.start % ALIGNMENT for place in layout.places.values()} == {0}
    for name, array in arrays.items():
        assert np.array_equal(getattr(batch, name).numpy(), array), name
    assert batch.positions.tolist() == [*range(2, 9), *range(3)]
    assert batch.slots.tolist() == [manager.slot("a", p) for p in range(2, 9)] + [
        manager.slot("b", p) for p in range(3)
    ]
    assert batch.query_starts.tolist() == [0, 7, 10] and batch.context_lens.tolist() == [9, 3]
    assert batch.rows.tolist() == [6]


def test_a_place_that_is_too_small_is_refused():
    layout = Layout.of_step(2, 2, 16)
    arrays = {name: np.zeros(shape, np.int32) for name, shape in layout.shapes.items()}
    arrays["tokens"] = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"tokens has shape \(3,\), there is room for \(2,\)"):
        layout.pack(arrays, np.zeros(layout.size, np.int32))


# ---- decode steps in buckets -----------------------------------------------------------------------------------------


def test_a_step_runs_in_the_smallest_bucket_that_holds_it():
    assert [bucket(s) for s in (1, 2, 3, 5, 9, 33, 64, 65, 256, 257)] == [1, 2, 4, 8, 16, 48, 64, 96, 256, 288]
    assert buckets(40) == [48, 32, 16, 8, 4, 2, 1]
    assert all(bucket(s) - s < STEP for s in range(1, 600))
    with pytest.raises(ValueError, match="at least 1 sequence, got 0"):
        bucket(0)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_padded_decode_step_gives_the_logits_of_the_eager_one_and_writes_nothing_else(count):
    model, manager = tiny_model(), BlockManager(40, BLOCK_SIZE)
    requests = [request(f"r{i}", 3 + 4 * i) for i in range(count)]
    held(manager, *requests)
    found, caches = [], []
    for graphs in (False, True):
        runner = ModelRunner(model, 40, BLOCK_SIZE, cuda_graphs=graphs)
        runner.run(Step([Chunk(r, 0, len(r.tokens) - 1) for r in requests]), manager)
        found.append(runner.run(Step([Chunk(r, len(r.tokens) - 1, 1) for r in requests]), manager))
        caches.append(runner.key_cache.clone())
    assert runner.graphs.recorded == [(bucket(count), 1, ALIGNMENT)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-5)
    right = torch.stack([right_logits(model, r.tokens)[-1] for r in requests])
    torch.testing.assert_close(found[1], right, rtol=1e-4, atol=1e-4)


def test_a_graph_sees_each_step_alone_whatever_the_last_one_left():
    seen = []

    def compute(batch):
        seen.append((batch.slots.tolist(), batch.context_lens.tolist(), batch.positions.tolist()))
        return batch.tokens.float()[:, None]

    manager, graphs = BlockManager(40, BLOCK_SIZE), StepGraphs(compute, Staging(torch.device("cpu")))
    requests = [request(f"r{i}", 2 + i) for i in range(4)]
    held(manager, *requests)
    for some in (requests, requests[1:]):
        arrays, decode = assemble([Chunk(r, len(r.tokens) - 1, 1) for r in some], manager, TableRows())
        assert decode
        logits = graphs.run(arrays, decode)
        assert logits[:, 0].tolist() == [r.tokens[-1] for r in some]
    slots = [manager.slot(r.id, len(r.tokens) - 1) for r in requests]
    assert seen == [(slots, [2, 3, 4, 5], [1, 2, 3, 4]), ([*slots[1:], -1], [3, 4, 5, 0], [2, 3, 4, 0])]


@pytest.mark.parametrize("rows", ["last", "all"])
def test_a_small_ragged_step_runs_in_a_graph_with_room_for_more_and_writes_nothing_else(rows):
    model, manager = tiny_model(), BlockManager(40, BLOCK_SIZE)
    drafted = DraftedRequest("drafted", request("drafted", 7).prompt)
    plain, late = request("plain", 5), request("late", 9)
    held(manager, drafted, plain, late)
    manager.append("drafted", [3, 1, 4])
    found, caches = [], []
    for graphs in (False, True):
        runner = ModelRunner(model, 40, BLOCK_SIZE, cuda_graphs=graphs, graph_chunks=[2, 4])
        drafted.draft = []
        runner.run(Step([Chunk(drafted, 0, 6), Chunk(plain, 0, 4), Chunk(late, 0, 6)]), manager)
        drafted.draft = [3, 1, 4]
        step = Step([Chunk(plain, 4, 1), Chunk(drafted, 6, 4), Chunk(late, 6, 2)])  # the last does not end its request
        found.append(runner.run(step, manager, rows))
        caches.append(runner.key_cache.clone())
    assert runner.graphs.recorded == [(4, 2, ALIGNMENT), (4, 4, ALIGNMENT)]  # for 7 tokens and for 16
    assert len(found[1]) == (5 if rows == "last" else 7)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-4, atol=1e-4)


def test_a_step_of_more_tokens_than_graphs_have_room_for_is_not_recorded():
    manager, graphs = BlockManager(40, BLOCK_SIZE), StepGraphs(None, Staging(torch.device("cpu")), chunks=[3])
    one, two = request("one", 9), request("two", 2)
    held(manager, one, two)
    arrays, decode = assemble([Chunk(one, 0, 6), Chunk(two, 0, 1)], manager, TableRows())
    assert graphs.run(arrays, decode) is None and graphs.recorded == []


def test_warming_up_records_every_bucket_ahead():
    model = tiny_model(layers=1)
    runner = ModelRunner(model, 100, BLOCK_SIZE, cuda_graphs=True)
    runner.warm_up(5, 100)
    assert runner.graphs.recorded == [(sequences, 1, width) for sequences in (1, 2, 4, 8) for width in (16, 32)]
    written = runner.key_cache.nonzero()
    assert written.tolist() == []  # recording runs the step, and it must not write
    wider = ModelRunner(model, 100, BLOCK_SIZE, cuda_graphs=True, graph_chunks=[3])
    wider.warm_up(2, 64)
    assert wider.graphs.recorded == [(sequences, tokens, 16) for sequences in (1, 2) for tokens in (1, 3)]
    assert not wider.value_cache.any()
    ModelRunner(model, 100, BLOCK_SIZE, cuda_graphs=False).warm_up(5, 100)  # nothing to record
