"""Lab 5's model runner: ragged batches, padded decode steps and fused layers against the plain decoder, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_serving_model import SEED

from solutions.lab5_serving import BlockManager, Chunk, ModelRunner, Request, Step
from solutions.lab5_serving import fused_layers as fused
from solutions.lab5_serving.batch import ALIGNMENT, Layout, Staging, TableRows, assemble, table_width
from solutions.lab5_serving.cuda_graphs import STEP, DecodeGraphs, bucket, buckets
from solutions.lab5_serving.fused_decoder import FusedDecoder, join
from utils import runtime
from utils.compile_only import Request as Compile
from utils.compile_only import resource_usages
from utils.serving import Decoder, ModelConfig, attend_causally
from utils.serving.model import rotary_frequencies, rotate

BLOCK_SIZE = 4
FAMILIES = {
    "qwen3": {"qk_norm": True, "tied_head": True},
    "qwen2": {"qkv_bias": True, "num_kv_heads": 1},
    "llama": {"output_bias": True, "qkv_bias": True, "mlp_bias": True},
}


def tiny_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, layers: int = 2) -> Decoder:
    """Every weight random, so that a swapped or forgotten one shows."""
    sizes = {"num_kv_heads": 2} | FAMILIES[family]
    config = ModelConfig(
        family=family, vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=layers, num_heads=4, head_dim=16,
        max_seq_len=64, **sizes,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = Decoder(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(mean=float(weight.ndim == 1), std=0.3)
    model = model.to(dtype).to(runtime.DEVICE)
    model.frequencies = rotary_frequencies(config).to(runtime.DEVICE)
    return model


def request(id: str, length: int) -> Request:
    chance = torch.Generator().manual_seed(sum(map(ord, id)) * 1000 + length)
    return Request(id, torch.randint(61, (length,), generator=chance).tolist())


def held(manager: BlockManager, *requests: Request) -> None:
    for each in requests:
        manager.allocate(each.id, each.tokens)


def right_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits (tokens, V) of the model itself, without a cache."""
    ids = torch.tensor(tokens, device=model.device)
    return model(ids, torch.arange(len(tokens), device=model.device), attend_causally)


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
    drafted, plain = request("drafted", 7), request("plain", 5)
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
    layout = Layout.of_decode(2, 16)
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
    assert runner.graphs.recorded == [(bucket(count), ALIGNMENT)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-5)
    right = torch.stack([right_logits(model, r.tokens)[-1] for r in requests])
    torch.testing.assert_close(found[1], right, rtol=1e-4, atol=1e-4)


def test_a_graph_sees_each_step_alone_whatever_the_last_one_left():
    seen = []

    def compute(batch):
        seen.append((batch.slots.tolist(), batch.context_lens.tolist(), batch.positions.tolist()))
        return batch.tokens.float()[:, None]

    manager, graphs = BlockManager(40, BLOCK_SIZE), DecodeGraphs(compute, Staging(torch.device("cpu")))
    requests = [request(f"r{i}", 2 + i) for i in range(4)]
    held(manager, *requests)
    for some in (requests, requests[1:]):
        arrays, decode = assemble([Chunk(r, len(r.tokens) - 1, 1) for r in some], manager, TableRows())
        assert decode
        logits = graphs.run(arrays)
        assert logits[:, 0].tolist() == [r.tokens[-1] for r in some]
    slots = [manager.slot(r.id, len(r.tokens) - 1) for r in requests]
    assert seen == [(slots, [2, 3, 4, 5], [1, 2, 3, 4]), ([*slots[1:], -1], [3, 4, 5, 0], [2, 3, 4, 0])]
    with pytest.raises(ValueError, match=r"there is room for \(2,\)"):
        graphs.run(arrays, graphs.prepare(2, ALIGNMENT))


def test_warming_up_records_every_bucket_ahead():
    runner = ModelRunner(tiny_model(layers=1), 100, BLOCK_SIZE, cuda_graphs=True)
    runner.warm_up(5, 100)
    assert runner.graphs.recorded == [(1, 32), (2, 32), (4, 32), (8, 32)]
    assert not runner.key_cache.any()  # recording runs the step, and it must not write
    ModelRunner(tiny_model(layers=1), 100, BLOCK_SIZE, cuda_graphs=False).warm_up(5, 100)  # nothing to record


# ---- fused layers ----------------------------------------------------------------------------------------------------


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype).to(runtime.DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_norm_adds_to_the_stream_and_normalises_the_sum(dtype):
    x, residual, weight = normal(3, 24, dtype=dtype), 2 * normal(3, 24, dtype=dtype).flip(0), normal(24, dtype=dtype)
    norm = tiny_model(dtype=dtype, layers=1).norm
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(fused.rms_norm(x, weight, norm.eps), norm(x), **tolerance)
    total = residual + x
    found = fused.rms_norm(x, weight, norm.eps, residual=residual)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(found, norm(total), **tolerance)


def test_the_fused_gate_is_silu_times_up():
    gate_up = normal(3, 2 * 40)
    right = torch.nn.functional.silu(gate_up[:, :40]) * gate_up[:, 40:]
    torch.testing.assert_close(fused.silu_and_multiply(gate_up), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
def test_queries_turn_in_place_and_keys_and_values_go_to_their_slots(monkeypatch, with_norm):
    monkeypatch.setattr(fused, "HEAD_TILE", 2 * 16)  # several programs a token
    model = tiny_model(layers=1)
    attention, positions = model.layers[0].self_attn, torch.tensor([5, 0, 63], device=runtime.DEVICE)
    qkv = normal(3, 8 * 16)
    q, k, v = (part.unflatten(1, (-1, 16)).clone() for part in qkv.split([64, 32, 32], 1))
    angles = positions[:, None, None].float() * model.frequencies
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps) if with_norm else None
    if with_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    tables = FusedDecoder(model, 64)
    caches = [torch.zeros(3, 2, BLOCK_SIZE, 16, device=runtime.DEVICE).transpose(1, 2) for _ in range(2)]
    slots = torch.tensor([9, -1, 0], dtype=torch.int32, device=runtime.DEVICE)
    found = fused.rotate_and_store(qkv, positions.int(), slots, tables.cos, tables.sin, *caches, 4, norms)
    torch.testing.assert_close(found, rotate(q, cos, sin), rtol=1e-5, atol=1e-5)
    for cache, right in zip(caches, (rotate(k, cos, sin), v), strict=True):
        torch.testing.assert_close(cache[2, 1], right[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cache[0, 0], right[2], rtol=1e-5, atol=1e-5)
        cache[2, 1], cache[0, 0] = 0, 0
        assert not cache.any()  # the token without a slot is nowhere


def test_joined_weights_live_in_one_place_and_stay_the_models_own():
    model = tiny_model("qwen2", layers=1)
    attention = model.layers[0].self_attn
    modules = (attention.q_proj, attention.k_proj, attention.v_proj)
    before = torch.cat([module.weight for module in modules])
    joined = join(modules)
    assert torch.equal(joined, before)
    joined[64] = 7.0
    assert torch.equal(attention.k_proj.weight[0], torch.full((24,), 7.0, device=runtime.DEVICE))
    assert join(modules).data_ptr() == joined.data_ptr()  # a second time nothing moves
    assert join(modules, "bias").shape == (96,) and join((model.lm_head,), "bias") is None


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_decoder_over_the_labs_kernels_is_the_decoder(family):
    model, manager = tiny_model(family), BlockManager(40, BLOCK_SIZE)
    runner = ModelRunner(model, 40, BLOCK_SIZE, attention="triton", fused=True, cuda_graphs=True)
    long, short = requests = request("long", 11), request("short", 4)
    held(manager, *requests)
    right = [right_logits(model, each.tokens) for each in requests]
    runner.run(Step([Chunk(long, 0, 5)]), manager)
    runner.run(Step([Chunk(long, 5, 5), Chunk(short, 0, 3)]), manager)
    found = runner.run(Step([Chunk(short, 3, 1), Chunk(long, 10, 1)]), manager)
    torch.testing.assert_close(found, torch.stack([right[1][-1], right[0][-1]]), rtol=1e-4, atol=1e-4)
    everything = runner.run(Step([Chunk(long, 0, 11)]), manager, rows="all")
    torch.testing.assert_close(everything, right[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_fused_decoder_errs_in_bfloat16_no_more_than_the_decoder():
    wide, narrow = tiny_model(), tiny_model(dtype=torch.bfloat16)
    for name, weight in wide.named_parameters():
        weight.copy_(narrow.get_parameter(name).float())
    manager, asked = BlockManager(40, BLOCK_SIZE), request("asked", 9)
    held(manager, asked)
    runner = ModelRunner(narrow, 40, BLOCK_SIZE, fused=True)
    step = Step([Chunk(asked, 0, 9)])
    right = right_logits(wide, asked.tokens)
    errors = [
        float((found.float() - right).norm() / right.norm())
        for found in (runner.run(step, manager, rows="all"), right_logits(narrow, asked.tokens))
    ]
    assert errors[0] <= 2 * errors[1] + 1e-3, errors


# ---- compiled for a GPU ----------------------------------------------------------------------------------------------


def compiled(capability: int, dtype: str) -> list[Compile]:
    """The three kernels with the sizes of Qwen3-0.6B, as they are launched."""
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr"), f"*{dtype}")
    strides = dict.fromkeys(("stride_x", "stride_r", "stride_y"), "i32")
    norm = {**pointers, **strides, "eps": "fp32"}
    names = ["qkv", "q_weight", "k_weight", "k_cache", "v_cache"]
    rotation = {f"{name}_ptr": f"*{dtype}" for name in names}
    rotation |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i32", "slots_ptr": "*i32"}
    rotation |= {f"stride_{x}": "i32" for x in ("t", "kb", "kt", "kg", "vb", "vt", "vg")} | {"eps": "fp32"}
    sizes = {
        "H": 16, "G": 8, "HALF": 64, "BLOCK_HEADS": 32, "BLOCK_HALF": 64, "BLOCK_SIZE": 16, "stride_kd": 1,
        "stride_vd": 1,
    }  # fmt: skip
    gate = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "stride_x": "i32", "stride_y": "i32"}

    def aligned(signature):
        return [name for name, kind in signature.items() if kind != "fp32"]

    found = [
        Compile(fused.rms_norm_kernel, norm, {"SIZE": 1024, "BLOCK": 1024, "ADD": add}, capability, 2, 3, aligned(norm))
        for add in (False, True)
    ]
    found += [
        Compile(
            fused.rotate_and_store_kernel, rotation, sizes | {"NORM": with_norm}, capability, 4, 3, aligned(rotation)
        )
        for with_norm in (False, True)
    ]
    constants = {"SIZE": 3072, "BLOCK": 1024}
    return [*found, Compile(fused.silu_and_multiply_kernel, gate, constants, capability, 4, 3, aligned(gate))]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_fused_kernels_compile_and_spill_nothing(capability):
    for used in resource_usages(compiled(capability, "bf16")):
        assert used.stack_bytes == 0, used
        assert used.registers * used.threads <= 65536, used
