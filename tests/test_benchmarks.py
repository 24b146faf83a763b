"""The benchmarks without a GPU: every script runs on small sizes, with known times, and fills its record's schema."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from benchmarks import (
    access,
    alignment,
    benchmark_cli,
    ceilings,
    cuda_program,
    latency,
    matmul_sweep,
    operator_classes,
    operators,
    profiler_truth,
    trace,
    vocabulary,
)
from benchmarks import (
    all as every,
)
from benchmarks.benchmark_cli import problems
from utils import records, runtime
from utils.course_modules import Course
from utils.fingerprint import files


def test_ceilings_fill_their_schema(known_times):
    results = ceilings.measure(copy_bytes=[64, 128], matmul_sizes={"fp32": [8], "tf32": [8], "bf16": [8, 16]})
    assert problems("ceilings", results) == []
    assert results["copy"][1]["bytes_per_second"] == pytest.approx(2 * 128 / 11e-6)
    assert results["best"]["matmul_flops_per_second"]["bf16"] == pytest.approx(2 * 16**3 / 11e-6)
    assert "matmul bf16 16" in ceilings.table(results)


def test_a_product_that_the_machine_lacks_is_recorded_with_its_reason(known_times, monkeypatch):
    def refuse(dtype, n):
        raise RuntimeError("no such product here\nand a long trace")

    monkeypatch.setattr(ceilings, "matmul_call", refuse)
    results = ceilings.measure(copy_bytes=[64], matmul_sizes={"fp8": [16]})
    assert results["unavailable"] == {"fp8": "no such product here"}
    assert "not measured: no such product here" in ceilings.table(results)


def test_operators_fill_their_schema_and_cover_every_kind(known_times):
    small = {
        "copy": {"n": 64}, "add": {"n": 64}, "axpy": {"n": 64}, "relu": {"n": 64}, "gelu": {"n": 64}, "dot": {"n": 64},
        "softmax": {"rows": 4, "cols": 8}, "layer_norm": {"rows": 4, "cols": 8}, "transpose": {"rows": 4, "cols": 8},
        "matmul": {"m": 4, "k": 8, "n": 2}, "batched_matmul": {"batch": 2, "m": 4, "k": 8, "n": 2},
        "flash_attention": {"batch": 1, "heads": 2, "seq_len": 4, "head_dim": 8, "causal": 1},
        "eager_attention": {"batch": 1, "heads": 2, "seq_len": 4, "head_dim": 8},
    }  # fmt: skip
    assert set(small) == set(operators.COSTS)
    cases = [(kind, kind, "fp32", params) for kind, params in small.items()]
    results = operators.measure(points=cases, held_out=cases)
    assert problems("operators", results) == []
    assert "eager_attention" in operators.table(results)


def test_the_two_attentions_compute_the_same(known_times):
    torch.manual_seed(0)
    params = {"batch": 1, "heads": 2, "seq_len": 6, "head_dim": 8}
    eager = operators.build("eager_attention", "fp32", params)()
    torch.manual_seed(0)
    flash = operators.build("flash_attention", "fp32", {**params, "causal": 0})()
    torch.testing.assert_close(eager, flash)


def test_the_matmul_sweep_fills_its_schema(known_times):
    tile = (16, 32, 16, 4, 4, 1)
    results = matmul_sweep.measure(quick=True, sizes=[16, 24], fixed_sizes=[16, 32], tiles=[tile], k=16)
    assert problems("matmul_sweep", results) == []
    assert [point["tiles"] for point in results["fixed_tile"][0]["points"]] == [1, 2]
    assert "gemm_128x256" in matmul_sweep.table(results)


@pytest.mark.slow
def test_alignment_fills_its_schema_and_changes_one_axis_at_a_time(known_times):
    results = alignment.measure(base=16, divisors=(1, 2, 128))
    assert problems("alignment", results) == []
    by_axis = {(p["axis"], p["divisor"]): (p["m"], p["k"], p["n"]) for p in results["points"]}
    assert by_axis["k", 1] == (144, 17, 144) and by_axis["all", 2] == (18, 18, 18)
    assert all(p["ratio"] == 1 for p in results["points"] if p["divisor"] == 128)
    assert "k = 16 + 1" in alignment.table(results)


def test_the_vocabulary_fills_its_schema(known_times):
    results = vocabulary.measure(shapes=[(4, 8)], sizes=(13, 16))
    assert problems("vocabulary", results) == []
    assert [p["pass"] for p in results["points"]] == ["forward", "forward and backward"]
    forward = results["points"][0]["times"][0]
    assert forward["flops_per_second"] == pytest.approx(2 * 4 * 8 * 13 / forward["seconds"])
    assert "4 x 8, forward" in vocabulary.table(results)


def test_operator_classes_fill_their_schema(known_times):
    shape = {"batch": 2, "seq_len": 4, "hidden": 8, "heads": 2}
    results = operator_classes.measure(variants=("unfused", "fused attention"), shape=shape, steps=2)
    assert problems("operator_classes", results) == []
    assert results["variants"]["unfused"]["shares"]["contraction"] == 1
    assert "fused attention" in operator_classes.table(results)


def test_fused_and_unfused_layers_compute_the_same_without_dropout():
    torch.manual_seed(0)
    unfused = operator_classes.EncoderLayer(16, 2, fused_attention=False, dropout=0.0)
    fused = operator_classes.EncoderLayer(16, 2, fused_attention=True, dropout=0.0)
    fused.load_state_dict(unfused.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(unfused(x), fused(x))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "contraction"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>(Params)", "contraction"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams)", "contraction"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, true>(Flash_fwd_params)",
            "contraction",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_bf16_knob_3", "contraction"),
        ("void (anonymous namespace)::softmax_warp_forward<float, c10::BFloat16, 9, false>(int)", "normalisation"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>(int)", "normalisation"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel_32x32<c10::BFloat16>()", "normalisation"),
        ("triton_per_fused__softmax_native_dropout_2", "normalisation"),
        ("triton_red_fused_native_layer_norm_backward_sum_7", "normalisation"),
        ("triton_poi_fused_gelu_backward_3", "element-wise"),
        ("triton_tem_fused_mm_4", "contraction"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
            "element-wise",
        ),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>(int)", "element-wise"),
        ("void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16, float>(int)", "element-wise"),
    ],
)
def test_a_kernel_belongs_to_the_class_that_its_name_says(kernel, expected):
    assert operator_classes.class_of(kernel) == expected


def test_shares_by_class_are_means_over_steps():
    step = [trace.Kernel("nvjet_128x256", 3e-6, (1, 1, 1)), trace.Kernel("reduce_kernel", 1e-6, (1, 1, 1))]
    found = operator_classes.by_class([step, step])
    assert found["classes"]["contraction"] == pytest.approx(3e-6)
    assert found["shares"]["element-wise"] == pytest.approx(0.25)
    assert [(k["name"], k["calls"]) for k in found["kernels"]] == [("nvjet_128x256", 1), ("reduce_kernel", 1)]


# ---- traces ---------------------------------------------------------------------------------------------------------


def event(name, ts, dur=2.0, cat="kernel", grid=(3, 1, 1)):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"grid": list(grid)}}


def test_a_trace_is_cut_at_its_markers_in_order_of_time():
    marker = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        event("late", 50.0), event(marker, 40.0), event(marker, 1.0), event("first", 2.0, grid=(9, 2, 1)),
        event("before any marker", 0.5), event("aten::mm", 3.0, cat="cpu_op"), event("Memset", 4.0, cat="gpu_memset"),
    ]  # fmt: skip
    first, second = trace.split(events, 2)
    assert [kernel.name for kernel in first] == ["first", "Memset"]
    assert first[0].grid == (9, 2, 1) and first[0].seconds == pytest.approx(2e-6)
    assert [kernel.name for kernel in second] == ["late"]


def test_a_kernel_name_is_shortened_to_what_tells_it_apart():
    name = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(x)"
    )
    assert trace.short_name(name) == "at::native::vectorized_elementwise_kernel [FillFunctor]"
    name = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_128x256_align1>(Params)"
    assert trace.short_name(name) == "cutlass_80_tensorop_bf16_s16816gemm_128x256_align1"
    assert trace.short_name("nvjet_tst_128x256_64x4_1x2_h_bz_NNT") == "nvjet_tst_128x256_64x4_1x2_h_bz_NNT"
    assert trace.short_name("void (anonymous namespace)::softmax_warp<float, (int)3>(x)") == "softmax_warp"


# ---- CUDA sources ---------------------------------------------------------------------------------------------------


def test_the_sector_model_of_a_strided_copy_falls_to_an_eighth_and_stays():
    model = [access.sector_efficiency("strided copy", 4, stride, 0) for stride in (1, 2, 4, 8, 16, 32)]
    assert model == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 8, 1 / 8]
    assert access.sector_efficiency("strided read", 4, 8, 0) == pytest.approx(8 / (32 + 4))
    assert access.sector_efficiency("misaligned copy", 4, 1, 8) == 1
    assert access.sector_efficiency("misaligned copy", 4, 1, 1) == pytest.approx(8 / 9)
    assert access.sector_efficiency("element size", 1, 1, 0) == 1


def test_options_of_a_program_become_its_command_line(monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nprintf \'{"arguments": "%s", "gpu": "%s"}\' "$*" "$CUDA_VISIBLE_DEVICES"\n')
    program.chmod(0o755)
    monkeypatch.setattr(cuda_program, "build", lambda name: program)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert cuda_program.run("latency", page_span=3) == {"arguments": "--page-span 3", "gpu": "5"}


def test_a_program_that_fails_is_reported_with_what_it_said(monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(cuda_program, "build", lambda name: program)
    with pytest.raises(RuntimeError, match="latency failed with status 3: out of memory"):
        cuda_program.run("latency")


# ---- the hardware's counters ----------------------------------------------------------------------------------------


def counter_rows(*rows):
    lines = ["==PROF== Connected", '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    return "\n".join([*lines, *(",".join(f'"{cell}"' for cell in row) for row in rows)])


def test_counters_of_a_case_are_summed_over_its_kernels():
    text = counter_rows(
        (0, 1, "first", "a.sum", "sector", "1,024"), (0, 1, "first", "b.sum", "sector", "3"),
        (1, 1, "second(float*)", "a.sum", "sector", "6"), (2, 1, "first", "a.sum", "sector", "n/a"),
    )  # fmt: skip
    found = profiler_truth.read_counters(text, [("both", ("first", "second")), ("one", ("first",))])
    assert found == {"both": {"a.sum": 1030, "b.sum": 3}, "one": {}}


def test_counters_of_unexpected_kernels_are_refused():
    text = counter_rows((0, 1, "other", "a.sum", "sector", "1"))
    with pytest.raises(RuntimeError, match=r"should have seen the kernels \['mine'\], it saw \['other'\]"):
        profiler_truth.read_counters(text, [("case", ("mine",))])
    with pytest.raises(RuntimeError, match="printed no table: ==ERROR== no counters"):
        profiler_truth.read_counters("==ERROR== no counters", [])


def test_counters_that_a_gpu_lacks_are_left_out_unless_they_are_required():
    listing = "\n".join(f"{metric.rpartition('.')[0]}   Counter  sector  # of" for metric in profiler_truth.REQUIRED)
    assert profiler_truth.available_metrics(listing) == list(profiler_truth.REQUIRED)
    with pytest.raises(RuntimeError, match="do not include l1tex__t_sectors_pipe_lsu_mem_global_op_ld"):
        profiler_truth.available_metrics(listing.partition("\n")[2])


# ---- command lines --------------------------------------------------------------------------------------------------


def test_a_benchmark_without_a_gpu_measures_and_records_nothing(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    status = benchmark_cli.run("latency", lambda quick: pytest.fail("measured"), str, latency.SCHEMA, [])
    assert status == 1
    assert "needs a CUDA GPU" in capsys.readouterr().out


def test_quick_measures_but_records_nothing(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(records, "save", lambda *a: pytest.fail("recorded"))
    assert benchmark_cli.run("latency", lambda quick: {"quick": quick}, str, latency.SCHEMA, ["--quick"]) == 0
    assert "{'quick': True}" in capsys.readouterr().out


def test_one_failing_benchmark_leaves_the_others_and_makes_the_status_nonzero(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    ran = []

    def run(command, cwd, check):
        ran.append(command[2])
        return subprocess.CompletedProcess(command, 1 if "latency" in command[2] else 0)

    monkeypatch.setattr(every.subprocess, "run", run)
    assert every.main([]) == 1
    assert ran == [f"benchmarks.{name}" for name in benchmark_cli.benchmark_names()]
    assert re.search(r"FAIL latency .*status 1", capsys.readouterr().out)
    assert every.main(["ceilings", "--quick"]) == 0


def test_an_unknown_benchmark_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        every.main(["weather"])
    assert "unknown benchmark 'weather'" in capsys.readouterr().err


@pytest.mark.slow
def test_every_benchmark_that_is_found_has_a_schema_and_sources_that_exist():
    course = Course()
    for name in benchmark_cli.benchmark_names():
        assert isinstance(benchmark_cli.schema(name), dict)
        assert f"benchmarks/{name}.py" in files(benchmark_cli.sources(name), course)


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_the_operators_record_holds_the_costs_that_the_roofline_counts():
    results = records.load("operators").results
    for item in [*results["points"], *results["held_out"]]:
        cost = operators.cost_of(item["kind"], item["dtype"], item["params"])
        assert (item["flops"], item["bytes"]) == (cost.flops, cost.bytes), item["name"]


@pytest.mark.slow
def test_the_access_record_holds_the_efficiencies_that_the_model_gives():
    for point in records.load("access").results["points"]:
        model = access.sector_efficiency(point["pattern"], point["element_size"], point["stride"], point["offset"])
        assert point["sector_efficiency"] == pytest.approx(model)
