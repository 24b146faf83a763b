"""The faster backward kernels: right in whatever order their barriers allow at each step, and cheap when compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gluon_emulator
import pytest
import torch
from parameters import thorough_but
from test_capstone import SHARED_MEMORY, compile_orders

from benchmarks.attention_errors import plain_attention
from utils.fingerprint import ROOT
from utils.gluon.machine import Descriptor, Fault, Pointer, Shared

launch = pytest.importorskip("solutions.capstone_hopper.launch_reordered", reason="this Triton has no Gluon")
launch_wide = pytest.importorskip("solutions.capstone_hopper.launch_wide", reason="this Triton has no Gluon")
FOLDER = ROOT / "solutions" / "capstone_hopper"
#: Of a head_dim of 256, and of any other: the kernel's name, its file, and the module that launches it.
WIDE = ("hopper_wide_backward_kernel", "backward_wide.py", launch_wide)
NARROW = ("reordered_backward_kernel", "backward_reordered.py", launch)
#: (batch, query heads, key heads, queries, keys): tiles that end early on either side, queries that see no key, groups
#: of heads, several tiles each way.
SHAPES = [(1, 2, 1, 1, 77), (1, 2, 2, 65, 515), (1, 2, 1, 515, 65), (2, 2, 2, 256, 128)]
#: Head dimension and steps: those that win, all others, all.
WINNERS = ("balanced", "ordered")
STEPS = tuple(step.name.lower() for step in launch.Step)
OTHERS = tuple(step for step in STEPS if step not in WINNERS)
COMPILED = [(64, WINNERS), (64, OTHERS), (128, WINNERS + OTHERS)]
#: Bytes of registers that *ordered* keeps in memory outside of its loop, once a program, at most.
ORDERED_SPILLS = 16
#: Largest error, as a share of the largest right value.
ALLOWED = {torch.bfloat16: 0.02, torch.float16: 0.004}


class Emulator(gluon_emulator.Emulator):
    """The emulator with sums from registers, which arrive at once, and with turns.

    What TMA adds arrives some time after it has been read.
    """

    ordered = False

    def names(self) -> dict[str, object]:
        self.turns: set[int] = set()
        self.adding: dict[str, list[Callable[[], None]]] = {}
        names = super().names()
        names["gl"].atomic_add = self.atomic_add
        names["gl"].num_programs = self.num_programs
        names["gl"].int32 = torch.int32
        return names

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def assembly(self, text: str, constraints: str, arguments: list, dtype: torch.dtype, is_pure: bool, pack: int):
        """What minds turns. Programs run one after another here: others have added, but that may be seen late.

        Who had to wait for a later program would wait for ever.
        """
        if "wait_group" in text:
            self.store_wait(0)
            for add in self.adding.pop(self.machine.current, []):
                add()
            return 0
        counter, *before = arguments
        counts, part = counter.tensor.view(-1), counter.offset
        if "ld.acquire" in text:
            if counts[part] != before[0]:
                raise Fault("deadlock", f"{before[0]} programs should have added to part {part}, {counts[part]} have")
            seen: list[bool] = []
            self.machine.add(lambda: seen.append(True))
            self.machine.pause(lambda: bool(seen), lambda: f"waits for its turn at part {part}")
            self.turns.add(part)
        else:
            if part in self.turns:
                raise Fault("race", f"a turn ends before part {part} is added")
            counts[part] += 1
        return 0

    def in_turn(self, part: int) -> None:
        if self.ordered and part not in self.turns:
            raise Fault("race", f"part {part} is added before its turn")

    def atomic_add(self, pointer: Pointer, value: torch.Tensor, sem: str) -> None:
        assert sem == "relaxed" and pointer.tensor.dtype == value.dtype == torch.float32
        self.end_of(pointer)
        pointer.tensor.view(-1).index_add_(0, pointer.offset.flatten(), value.flatten())

    def store(self, pointer: Pointer, value: torch.Tensor, mask: bool = True) -> None:
        """What the first program in turn does instead."""
        self.end_of(pointer)
        super().store(pointer, value, mask)

    def end_of(self, pointer: Pointer) -> None:
        part = pointer.offset.flatten()[0].item() // launch.PART
        self.in_turn(part)
        self.turns.discard(part)

    def add_tile(self, descriptor: Descriptor, at: list[int], tile: Shared, add: bool = True) -> None:
        part = int(at[-2]) // descriptor.block_shape[-2]
        self.in_turn(part)
        mine = self.adding.setdefault(self.machine.current, [])

        def read(at: list[int], data: torch.Tensor, _add: bool) -> None:
            waiting = [data.clone()]

            def arrive() -> None:
                if waiting:
                    descriptor.write(at, waiting.pop(), add)
                    self.turns.discard(part)

            mine.append(arrive)
            self.machine.add(arrive)

        super().store_tile(SimpleNamespace(write=read), at, tile, add=True)

    def store_tile(self, descriptor: Descriptor, at: list[int], tile: Shared, add: bool = False) -> None:
        """Of dQ, the first program in turn stores; dK and dV are of another type."""
        if self.ordered and descriptor.tensor.dtype == torch.float32:
            self.add_tile(descriptor, at, tile, add)
        else:
            super().store_tile(descriptor, at, tile, add)

    def end(self) -> None:
        super().end()
        for add in itertools.chain(*self.adding.values()):
            add()


class Emulated:
    """Stands where the kernel is launched; each program runs in the emulator."""

    def __init__(self, seed: int, name: str, path: Path, first: int | None = None) -> None:
        self.seed, self.name, self.path, self.first = seed, name, path, first

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, num_warps, maxnreg, **constants: self.run(grid, arguments, constants)

    def run(self, grid: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        emulator = Emulator(self.seed, self.first)
        names = gluon_emulator.kernel_of(self.path, emulator.names())
        emulator.grid = grid
        emulator.ordered = constants.get("ORDERED", constants.get("STEP") == launch.Step.ORDERED)
        given = [self.argument(each) for each in arguments]
        for emulator.program in itertools.product(*map(range, grid)):
            emulator.run(lambda: names[self.name](*given, **constants))

    @staticmethod
    def argument(each):
        if hasattr(each, "block_shape"):
            return Descriptor(each.base, each.block_shape)
        return Pointer(each) if isinstance(each, torch.Tensor) else each


def drawn(seed: int, shape: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, a gradient of the output and one of the logsumexp."""
    batch, heads, kv_heads, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    found = [torch.randn((batch, *size, head_dim), generator=generator).to(dtype) for size in sizes]
    return [*found, torch.randn((batch, heads, queries), generator=generator)]


def errors(
    monkeypatch, seed: int, shape, head_dim: int, dtype: torch.dtype, causal: bool, step: str, folder: Path = FOLDER,
    first: int | None = None,
) -> list[float]:  # fmt: skip
    """Largest error of dq, dk and dv, each as a share of the largest right value.

    Args:
        step: One of the steps; of a head_dim of 256, ``balanced`` or ``ordered``.
        folder: Where the kernels' files are.
        first: As the emulator takes it.
    """
    name, file, module = WIDE if head_dim == 256 else NARROW
    monkeypatch.setattr(module, name, Emulated(seed, name, folder / file, first))
    q, k, v, do, dlse = drawn(seed, shape, head_dim, dtype)
    o, lse, *wanted = plain_attention(*(x.double() for x in (q, k, v, do)), dlse.double(), causal)
    given = (q, k, v, o.to(dtype), lse.float(), do, dlse, causal, head_dim**-0.5)
    with monkeypatch.context() as unwritten:
        empty = torch.empty
        unwritten.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
        if head_dim == 256:
            got = launch_wide.hopper_wide_backward(*given, step == "ordered")
        else:
            got = launch.hopper_backward_reordered(*given, launch.Step[step.upper()])
    assert all(mine.dtype == dtype and mine.shape == want.shape for mine, want in zip(got, wanted))
    return [((mine.double() - want).abs().max() / want.abs().max()).item() for mine, want in zip(got, wanted)]


def test_it_is_right_on_one_ragged_tile(monkeypatch):
    found = errors(monkeypatch, 3, (1, 2, 1, 70, 77), 64, torch.float16, True, "balanced")
    assert all(error < ALLOWED[torch.float16] for error in found), found


@pytest.mark.slow
@pytest.mark.parametrize("step", thorough_but(STEPS, "reordered", "balanced", "ordered"))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_step_is_right_in_whatever_order_things_happen(monkeypatch, head_dim, causal, step):
    for seed, shape in enumerate(SHAPES):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        found = errors(monkeypatch, seed, shape, head_dim, dtype, causal, step)
        assert all(error < ALLOWED[dtype] for error in found), (shape, found)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["balanced", "ordered"])
@pytest.mark.parametrize("causal", [False, True])
def test_wide_heads_are_right_in_whatever_order_things_happen(monkeypatch, causal, step):
    for seed, shape in enumerate(SHAPES):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        found = errors(monkeypatch, seed, shape, 256, dtype, causal, step)
        assert all(error < ALLOWED[dtype] for error in found), (shape, found)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", thorough_but((64, 128, 256), 128, 256))
def test_programs_take_turns_in_any_group_of_heads(monkeypatch, head_dim, causal):
    monkeypatch.setattr(launch, "heads_together", lambda kv_heads, touched: 1)
    monkeypatch.setattr(launch_wide, "heads_together", lambda kv_heads, touched: 1)
    for seed, shape in enumerate([(1, 6, 3, 200, 391), (1, 3, 3, 391, 200), (3, 1, 1, 256, 256)]):
        found = errors(monkeypatch, seed, shape, head_dim, torch.float16, causal, "ordered")
        assert all(error < ALLOWED[torch.float16] for error in found), (shape, found)


#: What is changed in which of the kernel's files, what the emulator then finds, and in which step; "wide": D = 256.
MISTAKES = {
    "one barrier": (
        "backward_reordered",
        {
            "index(step & 1), (step >> 1) & 1)": "index(0), step & 1)",
            "[GROUP].index(step & 1))": "[GROUP].index(0))",
            "steps & 1, (steps >> 1) & 1)": "0, steps & 1)",
        },
        "deadlock", "red",
    ),
    "no wait for the other half of dS": (
        "backward_reordered",
        {
            "    mbarrier.wait(ds_ready[1 - GROUP].index(step & 1), (step >> 1) & 1)\n    dq = dq_product"
            "(GROUP, ds_now, k_all, M, PART)\n    dk =": "    dq = dq_product(GROUP, ds_now, k_all, M, PART)\n    dk ="
        },
        "wrong", "red",
    ),
    "no wait for the other half of the dS before": (
        "backward_lagged",
        {"    mbarrier.wait(ds_ready[1 - GROUP].index(step % 3), (step // 3) & 1)\n": ""},
        "wrong", "lagged",
    ),
    "two places for dS": (
        "backward_lagged",
        {"ds_tile.index(step % 3)": "ds_tile.index(step & 1)"},
        "wrong", "lagged",
    ),
    "no wait for a turn": (
        "backward_lagged",
        {"            mbarrier.wait(turn.index((step - 1) & 1), ((step - 1) >> 1) & 1)\n": "            pass\n"},
        "race", "ordered",
    ),
    "a turn that ends a step too early": (
        "backward_ordered",
        {"index((step + 1) % 3), ((step + 1) // 3) & 1)": "index(step % 3), (step // 3) & 1)"},
        "race", "ordered",
    ),
    "a turn that nobody ends": (
        "backward_ordered",
        {"        end_turn(turns + PARTS * number + PART)\n        mbarrier.arrive(turn.index(step & 1))\n":
         "        end_turn(turns + PARTS * number + PART)\n"},
        "deadlock", "ordered",
    ),
    "nobody stores first": (
        "backward_lagged",
        {"M, N, CAUSAL) == 0": "M, N, CAUSAL) < 0"},
        "wrong", "ordered",
    ),
    "all store, wide": (
        "backward_wide",
        {"            if programs_before(lead, key_tile, M, N, CAUSAL) == 0:": "            if True:"},
        "wrong", "wide",
    ),
    "a turn that ends when TMA has read": (
        "backward_wide",
        {"        wait_for_sums()\n": "        tma.store_wait(0)\n"},
        "race", "wide",
    ),
    "no wait for a turn, wide": (
        "backward_wide",
        {"            mbarrier.wait(turn.index(step & 1), (step >> 1) & 1)\n": "            pass\n"},
        "race", "wide",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", thorough_but(MISTAKES, *list(MISTAKES)[::3]))
def test_what_the_barriers_are_for_shows_when_they_are_changed(monkeypatch, tmp_path, mistake):
    changed, edits, kind, step = MISTAKES[mistake]
    for file in FOLDER.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    text = (tmp_path / f"{changed}.py").read_text()
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    (tmp_path / f"{changed}.py").write_text(text)
    seen = set()
    for seed, first in enumerate((0, -1, *[None] * 20)):  # one partition always goes on if it can; whichever
        head_dim, of = (256, "ordered") if step == "wide" else (64, step)
        try:
            found = errors(monkeypatch, seed, (1, 1, 1, 769, 128), head_dim, torch.bfloat16, False, of, tmp_path, first)
        except Fault as fault:
            seen.add(fault.kind)
        else:
            if any(not error < ALLOWED[torch.bfloat16] for error in found):
                seen.add("wrong")
        if seen:
            break
    assert seen == {kind}


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("ordered", thorough_but([False, True], True))
def test_the_wide_kernel_compiles_for_hopper_and_its_values_stay_in_registers(ordered: bool):
    for used in compile_orders(("wide", True, "bf16", ordered), ("wide", False, "fp16", ordered, True)):
        assert used["shared"] <= SHARED_MEMORY and used["spilled"] == 0 and used["atomic_starts"] == 1, used
        assert not used["serialised"] and "cp.reduce.async.bulk.tensor" in used["instructions"], used


def test_another_head_dim_is_refused():
    q = torch.zeros(1, 1, 4, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128, got 256"):
        launch.hopper_backward_reordered(q, q, q, q, torch.zeros(1, 1, 4), q, None, False, 1.0, launch.Step.BALANCED)


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("compiled", thorough_but(COMPILED, COMPILED[0]))
def test_each_step_compiles_for_hopper_and_its_values_stay_in_registers(compiled: tuple[int, tuple[str, ...]]):
    head_dim, steps = compiled
    cases = [(step, causal) for step in steps for causal in (False, True)]
    orders = [("reordered", head_dim, causal, "bf16", step) for step, causal in cases]
    for case, used in zip(cases, compile_orders(*orders)):
        step = launch.Step[case[0].upper()]
        assert used["shared"] <= SHARED_MEMORY, (case, used)
        # some steps keep a few registers of the code before and after the loop elsewhere, once a program
        assert used["spilled"] <= (
            32 if step < launch.Step.REORDERED else ORDERED_SPILLS if step == launch.Step.ORDERED else 0
        ), (case, used)
        assert used["atomic_starts"] == 1, (case, used)
        assert not used["serialised"], case
        # S and dP overlap: nothing writes into an accumulator while another product is under way
        assert ("C7517" in used["advisories"]) == (step < launch.Step.LATE) and "C7512" not in used["advisories"], (
            case,
            used,
        )
        assert ("cp.reduce.async.bulk.tensor" in used["instructions"]) == (step < launch.Step.RED), case
        assert ("global.gpu.relaxed.add.v4.f32" in used["instructions"]) == (step >= launch.Step.RED), case
