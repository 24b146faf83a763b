"""The capstone's ladder: each step is right, a small change, and compiles for Hopper; traces and the wall."""

import inspect
import re

import gluon_emulator
import pytest
import torch
from parameters import thorough_but

from solutions.capstone_hopper import steps
from solutions.capstone_hopper.steps import compiler, host, patch, trace
from solutions.capstone_hopper.steps.wall import exponentials_beside_products
from utils import reference, runtime
from utils.environment import version_tuple
from utils.gluon.machine import Pointer
from utils.runtime import DEVICE

import triton  # isort: skip

PLAIN = steps.STEPS[:6]
GLUON = (*steps.STEPS[6:], *steps.TRIES)
EMULATED = 6
#: Keys a step of a Gluon kernel may not be without: (step, text, what stands there instead).
BROKEN = [
    ("one warpgroup", "mbarrier.wait(v_full.index(i % S), (i // S) & 1)", "pass"),
    ("producer", "mbarrier.wait(k_empty.index(i % S), ((i // S) & 1) ^ 1)", "pass"),
    ("producer", "((i // S) & 1) ^ 1", "((i // S) & 1)"),
    ("producer", "mbarrier.arrive(v_empty.index(i % S))", "pass"),
    ("overlap", "mbarrier.wait(v_full.index((i - 1) % S), ((i - 1) // S) & 1)", "pass"),
    ("overlap", "out = warpgroup_mma_wait(0, [out])", "out = warpgroup_mma_wait(1, [out])"),
    ("overlap", "((i - 1) // S) & 1", "(i // S) & 1"),
    ("ping-pong", "mbarrier.arrive(order.index(1 - GROUP))", "pass"),
    ("persistent", "mbarrier.wait(q_empty.index(group), (turn & 1) ^ 1)", "pass"),
    ("persistent", "mbarrier.wait(q_full, turn & 1)", "mbarrier.wait(q_full, 0)"),
    ("persistent", "fence_async_shared()\n    tma", "tma"),
]


def tensors(*shape: int, dtype=torch.bfloat16, seed: int = 0, device=DEVICE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]


def assert_attention(got, q, k, v, causal) -> None:
    want = reference.attention(q, k, v, causal)
    got = [x.cpu() for x in got]
    assert (got[0].double() - want[0]).abs().max() < 2e-2 and got[0].dtype == q.dtype
    assert (got[1].double() - want[1]).abs().max() < 1e-3 and got[1].dtype == torch.float32


# ---- what the steps are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [*zip(steps.STEPS, steps.STEPS[1:]), *((11, each) for each in steps.TRIES[:2])])
def test_each_step_adds_fewer_than_forty_lines(a, b):
    lines = steps.new_lines(a, b)
    assert 0 < len(lines) < 40


def test_a_try_without_order_is_step_11_less_one_line():
    assert steps.new_lines(11, "without order") == []
    (line,) = steps.new_lines("without order", 11)
    assert line.strip().startswith("total = settled(total)")


@pytest.mark.parametrize("each", steps.TRIES, ids=lambda each: each.name)
def test_the_compiler_finds_the_source_of_a_try(each):
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    softmax = inspect.getsource(each.load().online_softmax.fn)
    assert softmax in each.source and softmax.startswith("@gluon.jit\ndef online_softmax(")


@pytest.mark.parametrize(("base", "times"), [("x = 1\n", 0), ("x = 2\nx = 2\n", 2)])
def test_an_edit_whose_text_is_not_there_once_is_refused(base, times, tmp_path):
    (tmp_path / "base.py").write_text(f'"""A base."""\n{base}')
    edits = tmp_path / "edits.py"
    edits.write_text('"""A try."""\nBASE = "base.py"\nEDITS = (("x = 2", "x = 3"),)\n')
    with pytest.raises(ValueError, match=rf"edits\.py: base\.py must have this once, not {times} times: 'x = 2'"):
        patch.source_of(edits)


@pytest.mark.parametrize("each", steps.STEPS, ids=lambda each: each.name)
def test_a_step_is_one_kernel_and_its_module_says_what_it_does(each):
    assert each.source.count("def attention_kernel(") == 1
    assert "import" not in re.sub(r'""".*?"""', "", each.source, flags=re.DOTALL)
    assert each.path.read_text(encoding="utf-8").startswith(f'"""Step {each.number}: ')


def test_a_difference_is_a_unified_diff_of_the_kernels():
    text = steps.difference(9, "ping-pong")
    assert text.startswith("--- 9: overlap\n+++ 10: ping-pong\n@@")
    assert "+        mbarrier.wait(order.index(GROUP), (i + GROUP) & 1)" in text
    html = steps.difference_html(9, 10)
    assert "Step 10, ping-pong, against step 9, overlap: 6 new lines" in html and "<script" not in html
    assert "+        mbarrier.arrive(order.index(1 - GROUP))" in html
    assert "&lt;" in steps.difference_html(6, 7) and steps.difference(3, 3) == ""


@pytest.mark.parametrize("which", [0, 12, "eleven", True, None])
def test_a_step_that_is_not_there_is_refused(which):
    if which is True:
        assert steps.step(True) is steps.STEPS[0]
        return
    with pytest.raises(ValueError, match="step must be 1 to 11 or one of textbook, exp2"):
        steps.step(which)


# ---- what they compute -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("each", PLAIN, ids=lambda each: each.name)
def test_a_plain_step_computes_attention(each, causal):
    for heads, head_dim, dtype in ((2, 64, torch.bfloat16), (1, 128, torch.float16)):
        q, k, v = tensors(1, heads, 256, head_dim, dtype=dtype)
        assert_attention(each.forward(q, k, v, causal), q, k, v, causal)


def lists_of(tiles: int, programs: int) -> torch.Tensor:
    """Tiles dealt out to programs: a count and the tiles in each row."""
    lists = [list(range(tiles))[i::programs] for i in range(programs)]
    width = max(map(len, lists)) + 2
    return torch.tensor([[len(each), *each, *[0] * (width - 1 - len(each))] for each in lists], dtype=torch.int32)


def emulate(each, head_dim, length, causal, seed, path=None):
    q, k, v = tensors(1, 2, length, head_dim, seed=seed, device="cpu")
    lists = lists_of(2 * length // 128, 2) if each.number == 11 else None
    return gluon_emulator.forward(path or each.path, q, k, v, causal, seed, together=1 + seed % 2, lists=lists), q, k, v


@pytest.mark.slow
@pytest.mark.parametrize("each", GLUON, ids=lambda each: each.name)
def test_a_step_in_gluon_is_right_in_whatever_order_things_happen(each):
    for seed in range(EMULATED):
        causal, head_dim, length = bool(seed % 2), (64, 128)[seed // 2 % 2], (128, 384, 640)[seed % 3]
        got, q, k, v = emulate(each, head_dim, length, causal, seed)
        assert_attention(got, q, k, v, causal)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "instead"), BROKEN, ids=[f"{name}: {text}" for name, text, _ in BROKEN])
def test_a_barrier_that_is_missing_or_wrong_is_noticed(name, text, instead, tmp_path):
    each = steps.step(name)
    source = each.path.read_text(encoding="utf-8")
    assert text in source
    broken = tmp_path / each.path.name
    broken.write_text(source.replace(text, instead), encoding="utf-8")
    (tmp_path / "ring.py").write_text(each.path.with_name("ring.py").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(AssertionError):
        for seed in range(12):
            got, q, k, v = emulate(each, 64, 640, bool(seed % 2), seed, broken)
            assert_attention(got, q, k, v, bool(seed % 2))


def test_what_a_step_cannot_take_is_refused_by_name():
    q, k, v = tensors(1, 2, 128, 64)
    forward = steps.STEPS[0].forward
    with pytest.raises(TypeError, match="must all be float16 or all bfloat16, got float32, bfloat16, bfloat16"):
        forward(q.float(), k, v, False)
    with pytest.raises(ValueError, match=r"must have one shape \(B, H, N, D\)"):
        forward(q, k[:, :1], v, False)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128, got 32"):
        forward(*(x[..., :32] for x in (q, k, v)), False)
    with pytest.raises(ValueError, match="multiple of 128"):
        forward(*(x[:, :, :100] for x in (q, k, v)), False)
    with pytest.raises(ValueError, match="contiguous"):
        forward(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), False)


def test_a_step_in_gluon_says_that_it_needs_a_hopper(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", True)
    with pytest.raises(RuntimeError, match="step 10, ping-pong, needs a Hopper GPU"):
        steps.step(10).forward(*tensors(1, 2, 128, 64), False)


def test_heads_go_together_as_far_as_the_cache_reaches():
    q = torch.empty(8, 16, 2048, 128, dtype=torch.bfloat16, device="meta")
    assert host.heads_together(q) == 32
    assert host.heads_together(q[:1, :5]) == 5
    assert host.heads_together(torch.empty(1, 6, 32768, 128, dtype=torch.bfloat16, device="meta")) == 2


# ---- what they compile to --------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.thorough
def test_every_step_compiles_for_hopper_and_the_gluon_ones_without_spills():
    orders = [{"name": each.path.stem, "head_dim": 64, "CAUSAL": True} for each in (*PLAIN, *GLUON)]
    orders += [{"name": each.path.stem, "head_dim": 128, "CAUSAL": False} for each in GLUON[-2:]]
    modes = [{"OVERLAP": overlap, "PINGPONG": turns} for overlap, turns in trace.STEPS.values()]
    orders += [{"name": "traced", "head_dim": 128, "kind": "fp16", "CAUSAL": True, **mode} for mode in modes]
    overlapping = [each.path.stem for each in GLUON if each.number >= 9]
    for order, used in zip(orders, compiler.compile_apart(*orders, ptx=True)):
        plain = order["name"] in [each.path.stem for each in PLAIN]
        assert used["shared_bytes"] <= 227 * 1024, (order, used)
        traced = 16 if version_tuple(triton.__version__) < (3, 8) else 64  # clock reads take registers
        allowed = 64 if plain else traced if order["name"] == "traced" else 0
        assert used["spilled_bytes"] <= allowed, (order, used["text"])
        assert "serialized" not in used["text"], (order, used["text"])
        if order["name"] != "traced":
            assert (exponentials_beside_products(used["ptx"]) > 0) == (order["name"] in overlapping), order


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", thorough_but((64, 128), 128))
def test_plain_tritons_softmax_runs_beside_no_product(head_dim):
    overlapped, ordinary = (steps.wall(overlap, head_dim) for overlap in (True, False))
    serialised = re.match(r"\(C75\d\d\).*wgmma\.mma_async instructions are serialized", overlapped.warning)
    assert bool(serialised) == (version_tuple(triton.__version__) < (3, 8))
    assert overlapped.beside == ordinary.beside == 0 and ordinary.warning == ""


def test_an_exponential_is_beside_a_product_from_its_issue_to_the_wait_for_it():
    issue, wait, wait_but_one = "wgmma.commit_group", *(f"wgmma.wait_group.sync.aligned {n}" for n in (0, 1))
    for words, beside in (
        (("ex2", issue, wait, "ex2"), 0),
        ((issue, "ex2", "ex2", wait, "ex2"), 2),
        ((issue, issue, wait_but_one, "ex2", wait, "ex2"), 1),
        ((issue, wait_but_one, "ex2"), 1),
    ):
        ptx = "\n".join(f"\t{word}.approx.ftz.f32 %r1, %r2;" if word == "ex2" else f"\t{word};" for word in words)
        assert exponentials_beside_products(ptx) == beside, words


# ---- traces ----------------------------------------------------------------------------------------------------------


def traced_item(name: str, seed: int = 2) -> dict:
    """A trace of the emulated kernel: its clock counts events."""
    from solutions.capstone_hopper.steps import traced

    q, k, v = tensors(1, 2, 640, 64, seed=seed, device="cpu")
    times = torch.zeros((3, len(traced.CONSUMER_EVENTS), 5), dtype=torch.int64)
    overlap, turns = trace.STEPS[name]
    path = steps.step(name).path.with_name("traced.py")
    more = {"times_ptr": Pointer(times), "traced": 1, "most": 5, "OVERLAP": overlap, "PINGPONG": turns}
    got = gluon_emulator.forward(path, q, k, v, False, seed, **more)
    assert_attention(got, q, k, v, False)
    return trace._item(name, q, False, 1, times.tolist(), traced.CONSUMER_EVENTS, traced.PRODUCER_EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", trace.STEPS)
def test_a_trace_has_every_event_of_every_tile_in_order(name):
    item = traced_item(name)
    assert min(c for events in item["events"].values() for cycles in events.values() for c in cycles) == 0
    for who in trace.CONSUMERS:
        events = item["events"][who]
        for before, after in (
            ("asked", "keys_there"), ("keys_there", "scores_issued"), ("scores_issued", "scores_there"),
            ("scores_there", "softmax_done"), ("softmax_done", "output_issued"), ("output_issued", "output_there"),
        ):  # fmt: skip
            assert all(a < b for a, b in zip(events[before], events[after])), (who, before, after)
    copies = trace.timeline(item)["producer"]
    assert [copy.tile for copy in copies] == list(range(5)) and all(c.start < c.end for c in copies)


@pytest.mark.slow
def test_only_an_overlapping_step_has_products_beside_its_own_softmax():
    def overlaps(item) -> bool:
        mine = trace.timeline(item)["consumer 0"]
        softmaxes = [i for i in mine if i.what == "softmax"]
        return any(
            min(s.end, i.end) > max(s.start, i.start) for s in softmaxes for i in mine if i.what in ("scores", "output")
        )

    assert [overlaps(traced_item(name)) for name in trace.STEPS] == [False, True, True]


def test_shares_of_a_trace_are_of_its_whole_time():
    consumer = {
        "asked": [0], "keys_there": [10], "scores_issued": [10], "scores_there": [30], "softmax_done": [60],
        "output_issued": [60], "output_there": [100],
    }  # fmt: skip
    later = {event: [cycles[0] + 20 if event != "asked" else 20] for event, cycles in consumer.items()}
    item = {"events": {"consumer 0": consumer, "consumer 1": later, "producer": {"keys_issued": [0]}}}
    item["events"]["consumer 1"]["output_there"] = [100]
    shares = trace.busy(item)
    assert shares["products"] == pytest.approx((50 - 10 + 100 - 60) / 100)
    assert shares["softmax"] == pytest.approx((80 - 30) / 100)
    assert shares["copies"] == pytest.approx(0.1)


def test_a_trace_without_a_clock_read_is_refused():
    empty = [[[0] * 3] * 7] * 3
    q = torch.empty(1, 1, 384, 64)
    with pytest.raises(RuntimeError, match="without a clock read"):
        trace._item("overlap", q, False, 0, empty, ("output_there",), ("keys_issued",))
    with pytest.raises(ValueError, match="name must be one of producer, overlap, ping-pong, got 'exp2'"):
        trace.launch("exp2", *tensors(1, 1, 128, 64), False)
