"""Lab 6's kernels beside their baselines without a GPU: small sizes, known times, PyTorch in place of its kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from benchmarks import frontier_attention, frontier_cases, frontier_kernels, frontier_timing
from benchmarks.benchmark_cli import problems
from benchmarks.frontier_attention import FLEX, LAB3, Masked
from benchmarks.frontier_cases import CacheShape, LatentShape
from benchmarks.frontier_kernels import ATTENTION, FP8, GROUPED, INT4, PARTS, Sizes
from benchmarks.frontier_timing import Case, Comparison, Effort, relative_error, said
from utils import timing

SHORT = Effort(1, 0, 0)
WINDOW, DOCUMENTS = Masked("window 24", 24), Masked("documents", None, (40, 3, 21))
SMALL = Sizes(
    squares=(128,), weights=((32, 256),), batches=(1, 3), rotated_bytes=2**13, large_copy=2**12,
    cache=CacheShape(2, 24, 4, 2, 16, 8), latents=LatentShape(3, 20, 4, 32, 16, 4), matrix=32,
    groups=((48, 32, 64),), experts=3, masks=(WINDOW, DOCUMENTS), tokens=64, heads=2, head_dims=(16,),
)  # fmt: skip


def seen(mask, tokens):
    """Which keys a query sees, (tokens, tokens)."""
    lengths = torch.tensor(mask.documents or (tokens,))
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    ago = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (ago >= 0) & (ago < (mask.window or tokens)) & (document[:, None] == document)


def dense_flex(q, k, v, block_mask):
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen(block_mask, q.shape[2]), -math.inf)
    return scores.softmax(-1) @ v


@pytest.fixture
def small(known_times, monkeypatch):
    """PyTorch has what it has on a GPU."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1]) and b.stride(0) == 1
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for module in (frontier_attention, frontier_cases):
        monkeypatch.setattr(module, "SEVERAL", 1)
    monkeypatch.setattr(frontier_attention, "compiled_flex", lambda: dense_flex)
    monkeypatch.setattr(frontier_attention, "flex_mask", lambda mask, tokens: mask)


def test_every_part_fills_the_schema_and_every_result_is_right(small, capsys):
    results = frontier_kernels.measure(sizes=SMALL, effort=SHORT, workers=0)
    assert results["unavailable"] == {} and problems("frontier_kernels", results) == []
    by_part = {part: [p for p in results["points"] if p["part"] == part] for part in PARTS}
    assert {part: len(points) for part, points in by_part.items()} == {
        **dict.fromkeys(PARTS, 1), FP8: 2, INT4: 2, GROUPED: 2, ATTENTION: 2 + 4
    }  # fmt: skip
    first, second = by_part[INT4]
    assert {"of a copy", "of a large copy"} < set(first["ratios"]) and set(second["ratios"]) == {"ours / bf16"}
    assert set(by_part[GROUPED][1]["errors"]) == {"ours", "loop", "_grouped_mm"}
    assert [(p["direction"], p["how"]) for p in by_part[ATTENTION] if p["case"].startswith("documents")] == [
        (direction, how) for direction in ("forward", "backward") for how in ("graph", "calls")
    ]
    for p in by_part[ATTENTION]:
        assert set(p["timed"]) == {"ours", LAB3, FLEX} and p["computed"]["ours"] > p["timed"]["ours"]["amount"] * 0.8
    text = frontier_kernels.table(results)
    assert "of lab 3, per computed tile" in text and "of the larger bound" in text
    assert "128 square, forward, graph" in text and "up to a batch of: 32 x 256" in text
    assert "fp8 products, 128 square, forward, calls: ours, rows" in capsys.readouterr().out


def test_what_raises_or_is_wrong_is_named_and_the_others_are_measured(small, monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("no kernel in /root/.cache/triton/x.json\nwhatever\nPassManager::run failed")

    monkeypatch.setattr(torch, "_grouped_mm", broken)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: torch.zeros(len(a), b.shape[1]))
    monkeypatch.setattr(frontier_cases, "quantize_cache", broken)
    results = frontier_kernels.measure(sizes=SMALL, parts=PARTS[:5], effort=SHORT, workers=0)
    message = "ValueError: no kernel in (a path) ... PassManager::run failed"
    reasons = results["unavailable"]
    assert reasons["fp8 cache"] == message
    assert reasons["grouped products, 3 experts, 48 x 32 x 64, forward, graph: _grouped_mm"] == message
    assert reasons["fp8 products, 128 square, forward, calls: _scaled_mm, exact"].startswith(
        "RuntimeError: wrong by 1,"
    )
    assert {p["part"] for p in results["points"]} == {FP8, INT4, "latents", GROUPED}
    assert all("_grouped_mm" not in p["timed"] for p in results["points"])
    assert problems("frontier_kernels", results) == []


@pytest.mark.parametrize(
    "mask", [WINDOW, DOCUMENTS, Masked("causal"), Masked("both", 7, (33, 31))], ids=lambda m: m.name
)
def test_counted_tiles_are_those_with_a_visible_pair(mask):
    dense = seen(mask, 64)
    assert frontier_attention.visible_pairs(mask, 64) == int(dense.sum())
    for m, n in itertools.product((8, 16, 32), (8, 16)):
        pairs, start = 0, 0
        for length in mask.documents or (64,):  # tiles begin where the document does
            own = torch.zeros(math.ceil(length / 32) * 32, math.ceil(length / 32) * 32, dtype=torch.bool)
            own[:length, :length] = dense[start : start + length, start : start + length]
            pairs += int(own.unflatten(0, (-1, m)).unflatten(2, (-1, n)).any(3).any(1).sum()) * m * n
            start += length
        for of_keys in (False, True):
            assert frontier_attention.computed_pairs(mask, 64, m, n, of_keys) == pairs


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attentions_mask_is_the_one_of_our_documents_and_windows():
    for mask in (WINDOW, DOCUMENTS):
        found = frontier_attention.flex_mask(mask, 64).mask_mod
        places = torch.arange(64)
        assert torch.equal(found(None, None, places[:, None], places[None, :]), seen(mask, 64))
        q, k, v = torch.randn(3, 1, 2, 64, 16)
        o = frontier_attention.compiled_flex()(q, k, v, block_mask=frontier_attention.flex_mask(mask, 64))
        torch.testing.assert_close(o, dense_flex(q, k, v, mask), rtol=1e-5, atol=1e-5)


def test_documents_fill_the_tokens_and_counts_the_rows():
    assert all(sum(mask.documents) in (0, Sizes().tokens) for mask in Sizes().masks)
    counts = frontier_cases.uneven_counts(65536, 64)
    assert sum(counts) == 65536 and min(counts) > 0 and max(counts) > 5 * min(counts)


def test_the_nearest_bound_and_rates_by_amounts():
    def took(seconds):
        return timing.summarize([seconds] * 3)

    case = Case("latents", "x", "forward", "graph", bounds=("bytes", "FLOPs"))
    case.over = {"bytes": Comparison("ours", "copy"), "FLOPs": Comparison("ours", "product", 0.25)}
    found = frontier_timing.ratios(case, {"ours": took(4.0), "copy": took(2.0), "product": took(12.0)})
    assert found["bytes"]["ratio"] == 0.5 and found["of the larger bound"] == found["FLOPs"]
    assert found["FLOPs"]["ratio"] == pytest.approx(0.75)
    assert "of the larger bound" not in frontier_timing.ratios(case, {"ours": took(4.0), "copy": took(2.0)})


def test_the_batch_where_four_bits_no_longer_win():
    def item(batch, ratio):
        return {"part": INT4, "case": f"8 x 128, batch {batch}", "ratios": {"ours / bf16": {"ratio": ratio}}}

    assert frontier_kernels.int4_wins_to([item(1, 3.0), item(2, 1.1), item(4, 0.9), item(8, 1.2)]) == {"8 x 128": 2}
    assert frontier_kernels.int4_wins_to([item(1, 0.9), item(2, 1.1)]) == {"8 x 128": 0}


def test_jobs_compile_each_of_our_functions_and_only_those(small, monkeypatch):
    jobs = frontier_kernels.jobs(SMALL, PARTS)
    assert jobs[0] == (ATTENTION, 0, FLEX) and {job[0] for job in jobs} == set(PARTS)
    assert {job[0] for job in frontier_kernels.jobs(SMALL, [FP8])} == {FP8}
    ran = []
    monkeypatch.setattr(frontier_cases, "grouped_matmul", lambda x, w, counts: ran.append("ours") or x @ w[0])
    monkeypatch.setattr(torch, "_grouped_mm", lambda *arguments, **options: ran.append("theirs"))
    frontier_kernels.compile_job(SMALL, (GROUPED, 0, "ours"))
    assert set(ran) == {"ours"}


def test_a_number_that_is_not_finite_is_infinitely_wrong():
    assert relative_error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf
    assert said(ValueError()) == "ValueError" and said(ValueError("a\n\nb")) == "ValueError: a ... b"


def test_the_command_line_says_how_long_to_measure(monkeypatch):
    asked = {}

    def run(name, measure, table, schema, arguments):
        asked.update(measure.keywords, arguments=arguments)
        return 0

    monkeypatch.setattr("benchmarks.benchmark_cli.run", run)
    assert frontier_kernels.main(["--quick", "--rounds", "3", "--workers", "2"]) == 0
    assert asked["effort"] == Effort(3, 0.02, 0.3) and asked["workers"] == 2 and asked["arguments"] == ["--quick"]
