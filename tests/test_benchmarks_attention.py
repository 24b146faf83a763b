"""The benchmarks of attention's forward pass without a GPU: small sizes, known times, the schemas of their records."""

from __future__ import annotations

import pytest
import torch

from benchmarks import (
    attention_anchor,
    attention_blocks,
    attention_implementations,
    attention_memory,
    attention_stability,
    attention_traffic,
    truth,
)
from benchmarks.benchmark_cli import problems
from solutions.lab3_flash_attention import flash_forward
from utils import reference, runtime
from utils.attention_math import AttentionShape, attention_flops, flash2_traffic
from utils.kernel_profile import profile_kernel

ON_CPU = ("eager", "ours", "flash")


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype).to(runtime.DEVICE)


# ---- the implementations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ON_CPU)
def test_every_way_computes_attention_and_its_gradients(way, causal):
    half = way == "flash" and runtime.HAS_GPU  # PyTorch's flash backend on a GPU takes 16 bits only
    q, k, v, do = (normal(1, 2, 40, 16, dtype=torch.float16 if half else torch.float32) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    run = attention_implementations.forward(way, causal)
    found = attention_implementations.call(run, *leaves, do, step=False)()
    rtol, atol = (1e-2, 1e-2) if half else (1e-3, 1e-4)
    torch.testing.assert_close(found.double().cpu(), reference.attention(q, k, v, causal)[0], rtol=rtol, atol=atol)
    gradients = attention_implementations.call(run, *leaves, do, step=True)()
    for mine, right in zip(gradients, reference.attention_backward(q, k, v, do, causal), strict=True):
        torch.testing.assert_close(mine.double().cpu(), right, rtol=rtol, atol=atol)


# ---- memory and time -------------------------------------------------------------------------------------------------


def fake_peaks(monkeypatch, too_long=10**9):
    """Peaks that are the first result's size; eager attention of more than ``too_long`` tokens does not fit."""
    real = attention_implementations.eager

    def peak(run):
        found = run()
        return (found[0] if isinstance(found, tuple) else found).nbytes

    def eager(q, *rest):
        if q.shape[2] > too_long:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nMore")
        return real(q, *rest)

    monkeypatch.setattr(attention_memory, "peak_bytes", peak)
    monkeypatch.setattr(attention_memory, "WARM_UP", 16)
    monkeypatch.setattr(attention_implementations, "eager", eager)


@pytest.mark.slow
def test_memory_and_time_fill_their_schema(known_times, monkeypatch):
    fake_peaks(monkeypatch)
    monkeypatch.setattr(attention_memory, "HEADS", 2)
    small = AttentionShape(1, 2, 32, 16)
    published = {"eager, mask": ("eager", True, 0.0), "ours, mask": ("ours", True, 0.0)}
    results = attention_memory.measure(
        quick=True, sizes=(16, 32), ways=("eager", "ours"), shape=small, published=published
    )
    assert problems("attention_memory", results) == []
    assert len(results["memory"]) == len(results["times"]) == 2 * 2 * 2 and results["refused"] == {}
    step = next(t for t in results["times"] if t["pass"] == "step" and t["seq_len"] == 32)
    assert step["flops_per_second"] == pytest.approx(6 * 2 * 2 * 32**2 * 64 / step["seconds"])
    ours = results["published"]["ways"][1]
    assert ours["flops"] == attention_flops(small, 7, causal=True)
    assert "published configuration" in attention_memory.table(results)


@pytest.mark.slow
def test_what_does_not_fit_is_recorded_and_the_longest_is_measured_for_memory_only(known_times, monkeypatch):
    fake_peaks(monkeypatch, too_long=16)
    monkeypatch.setattr(attention_memory, "HEADS", 1)
    monkeypatch.setattr(attention_memory, "LONGEST_TIMED", 32)
    results = attention_memory.measure(
        quick=True, sizes=(16, 32, 48), ways=("eager", "ours"), shape=AttentionShape(1, 1, 16, 16),
        published={"ours": ("ours", False, 0.0)},
    )  # fmt: skip
    assert problems("attention_memory", results) == []
    assert list(results["refused"]) == ["eager, forward, N = 32", "eager, step, N = 32"]
    assert {p["seq_len"] for p in results["memory"] if p["way"] == "eager"} == {16}
    assert {p["seq_len"] for p in results["memory"] if p["way"] == "ours"} == {16, 32, 48}
    assert {p["seq_len"] for p in results["times"] if p["way"] == "ours"} == {16, 32}
    assert "out of memory" in attention_memory.table(results)


# ---- anchor ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_anchors_worth_fills_its_schema(known_times):
    results = attention_anchor.measure(
        shapes=[(1, 2, 32, 16, False), (1, 2, 32, 16, True)],
        rounds=3,
        seconds=0,
        lap_seconds=0,
        alone=(1, 1, 16, 16, False),
    )
    assert problems("attention_anchor", results) == []
    ways = {attention_anchor.ANCHORED, attention_anchor.INNER, attention_anchor.OUTGROWN}
    assert all(set(p["timed"]) - {attention_anchor.CUDNN} == ways for p in results["points"])
    assert all(set(p["anchored_over"]) == set(p["timed"]) - {attention_anchor.ANCHORED} for p in results["points"])
    text = attention_anchor.table(results)
    assert "D 16, N 32, causal" in text and "x inner loop" in text


@pytest.mark.slow
def test_outgrown_rows_are_computed_twice_and_others_once(monkeypatch):
    chosen = attention_anchor._tuning.forward  # in the interpreter no tile asks for the anchored loop

    def with_an_anchor(*args, anchored=True):
        return chosen(*args)._replace(anchored=anchored and all(args[5:]))

    monkeypatch.setattr(attention_anchor._tuning, "forward", with_an_anchor)
    q, k, v = (normal(1, 1, 160, 16) for _ in range(3))

    def keys_loaded(q, k):
        with profile_kernel() as profile:
            o, _ = flash_forward(q, k, v, anchored=True)
        torch.testing.assert_close(o.double().cpu(), reference.attention(q, k, v)[0], rtol=1e-4, atol=1e-4)
        return profile.by_argument["k_ptr"].bytes_loaded

    once = keys_loaded(q, k)
    assert keys_loaded(*attention_anchor.outgrowing(q, k)) == 2 * once
    with attention_anchor.with_a_running_maximum():
        assert not attention_anchor._tuning.forward(16, q.dtype, False, (0, 0)).anchored
        assert keys_loaded(*attention_anchor.outgrowing(q, k)) == once
    assert attention_anchor._tuning.forward(16, q.dtype, False, (0, 0)).anchored


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_block_sweep_fills_its_schema(known_times):
    shape = AttentionShape(1, 1, 32, 16)
    tiles = {16: [(16, 16, 4, 1), (32, 16, 4, 1), (16, 16, 8, 1)]}
    results = attention_blocks.measure(shapes=[shape], tiles=tiles, workers=1)
    assert problems("attention_blocks", results) == []
    assert [tuple(p["tile"]) for p in results["points"]] == tiles[16]
    fastest = attention_blocks.best(results, 16)
    assert set(fastest) == {(16, 16), (32, 16)}
    assert fastest[16, 16]["seconds"] == min(p["seconds"] for p in results["points"] if p["tile"][:2] == [16, 16])
    assert "32 x 16" in attention_blocks.table(results)


def test_a_tile_that_the_gpu_refuses_is_a_result_and_any_other_error_is_not(known_times, monkeypatch):
    class OutOfResources(Exception):
        pass

    real = flash_forward

    def refuse(q, k, v):
        if attention_blocks._tuning.forward(16, q.dtype, False, (9, 0)).m == 32:
            raise OutOfResources("out of resource: shared memory\nReducing block sizes may help")
        return real(q, k, v)

    monkeypatch.setattr(attention_blocks.lab, "flash_forward", refuse)
    shape, tiles = AttentionShape(1, 1, 16, 16), {16: [(16, 16, 4, 1), (32, 16, 4, 1)]}
    results = attention_blocks.measure(shapes=[shape], tiles=tiles, workers=1)
    assert problems("attention_blocks", results) == []
    assert results["refused"] == {"D 16, (32, 16, 4, 1)": "out of resource: shared memory"}
    monkeypatch.setattr(attention_blocks.lab, "flash_forward", lambda *a: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        attention_blocks.try_tile(shape, (16, 16, 4, 1))


def test_a_tile_holds_inside_the_block_only_and_changes_no_result():
    q, k, v = (normal(1, 1, 50, 16) for _ in range(3))
    before = attention_blocks._tuning.forward(16, q.dtype, False, (0, 0))
    with attention_blocks.tile_of_forward((16, 32, 4, 1)):
        assert attention_blocks._tuning.forward(16, q.dtype, False, (0, 0))[:4] == (16, 32, 4, 1)
        found, _ = flash_forward(q, k, v)
    assert attention_blocks._tuning.forward(16, q.dtype, False, (0, 0)) == before
    torch.testing.assert_close(found.double().cpu(), reference.attention(q, k, v)[0], rtol=1e-5, atol=1e-5)


# ---- stability -------------------------------------------------------------------------------------------------------


def test_the_stability_study_fills_its_schema():
    results = attention_stability.measure(sizes=(64,), tiles=(16, 64, 128), in_use=ON_CPU)
    assert problems("attention_stability", results) == []
    assert len(results["points"]) == 2 * 2 * (3 + 2 * 5 + 3)  # the tile of 128 is longer than the sequence
    assert "flash, low, tile 16" in attention_stability.table(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_rounding_all_methods_are_attention(dtype):
    q, k, v = (normal(1, 2, 50, 16).to(dtype) for _ in range(3))
    right = attention_stability.exact(q, k, v, rows=16)
    torch.testing.assert_close(right.cpu(), reference.attention(q, k, v)[0], rtol=1e-12, atol=1e-12)
    for softmax in attention_stability.STANDARD:
        found = attention_stability.standard(q, k, v, softmax, rows=16)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    for softmax in attention_stability.ROUNDED:
        found = attention_stability.flash(q, k, v, 16, softmax)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_what_is_rounded_in_the_study_is_what_its_name_says():
    q, k, v = attention_stability.inputs("normal", 512, torch.bfloat16, heads=2)
    right = attention_stability.exact(q, k, v)

    def rms(softmax, tile):
        return attention_stability.deviation(attention_stability.flash(q, k, v, tile, softmax), right)["rms"]

    floor = attention_stability.deviation(right.to(torch.bfloat16), right)["rms"]
    assert floor < rms("fp32", 16) < min(rms("scores", 16), rms("sum", 16), rms("output", 16)) < rms("low", 16)
    assert rms("low", 16) > 1.5 * rms("low", 512)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def ncu_table(groups):
    """A table as ncu prints it: a marker before each group, then its kernels with one metric."""
    rows, launch = ['"ID","Kernel Name","Metric Name","Metric Value"'], 0
    for kernels in groups:
        for name, value in [("spin_kernel(long)", 5), *kernels]:
            for metric in ("dram__sectors_read.sum", "l1tex__m_xbar2l1tex_read_sectors.sum"):
                rows.append(f'"{launch}","{name}","{metric}","{value:,}"')
            launch += 1
    return "==PROF== noise\n" + "\n".join(rows)


def test_counters_are_summed_over_the_kernels_between_markers():
    text = ncu_table([[("flash_forward_kernel", 1000)], [("gemm", 10), ("softmax", 20), ("gemm", 30)]])
    first, second = attention_traffic.read_groups(text, 2)
    assert first == {"kernels": 1, "dram__sectors_read.sum": 1000, "l1tex__m_xbar2l1tex_read_sectors.sum": 1000}
    assert second["kernels"] == 3 and second["dram__sectors_read.sum"] == 60
    with pytest.raises(RuntimeError, match="should have seen 3 calls"):
        attention_traffic.read_groups(text, 3)
    with pytest.raises(RuntimeError, match="printed no table: nothing"):
        attention_traffic.read_groups("nothing", 1)


@pytest.mark.slow
def test_the_record_of_the_traffic_has_its_schema_and_the_three_counts_agree():
    counted = attention_traffic.count()
    measured = []
    for counts in counted:  # hardware that counts as the profiler does
        sectors = {
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": counts["sectors_loaded"],
            "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": counts["sectors_stored"],
            "l1tex__m_xbar2l1tex_read_sectors.sum": counts["l2_sectors_loaded"],
            "lts__t_sectors_srcunit_tex_op_read.sum": counts["l2_sectors_loaded"],
            "lts__t_sectors_srcunit_tex_op_write.sum": counts["l2_sectors_stored"],
            "dram__sectors_read.sum": counts["dram_sectors_loaded"],
            "dram__sectors_write.sum": counts["dram_sectors_stored"],
        }
        measured.append({"kernels": 1, **sectors})
    measured += [{"kernels": 4, "dram__sectors_read.sum": 7}] * len(attention_traffic.LARGE)
    results = attention_traffic.assemble(counted, measured)
    assert problems("attention_traffic", results) == []
    for case in results["cases"]:
        for name in ("q", "k", "v", "o", "lse"):
            assert case["counted"][f"bytes_{name}"] == case["formula"][name], (case["name"], name)
        assert case["counted"]["flops"] == case["formula"]["flops"]
        assert all(row.equal for row in truth.rows(case))
    assert "ragged, causal" in attention_traffic.table(results)
    assert results["large"][0]["hbm_bytes_read"] == 7 * 32


def test_large_calls_are_held_against_the_formulas_of_both_algorithms():
    shape = attention_traffic.LARGE_SHAPE
    n2, nd = shape.score_elements, shape.query_elements
    assert attention_traffic.formula_bytes("eager") == 2 * (4 * n2 + 6 * nd)
    assert attention_traffic.formula_bytes("flash") == flash2_traffic(shape, 128, 64, "fp16").total
