"""The checks of exercises 3.8 and 3.9: attention as an operator that autograd knows, and its speed."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.hidden import Observation, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import launched, never_launched, no_atomics
from utils.checks.problem import Problem
from utils.checks.speed import Speed
from utils.checks.tensors import difference

from . import forward, gradients, hidden, shapes, tiles, training, walk
from .anchored import anchored, compiles_anchored
from .hopper import DESCRIBED, launched_on_hopper
from .mistakes import explains
from .shapes import sizes

Tensor = torch.Tensor
Attention = Callable[..., Any]
_OUTPUTS = ("o", "lse", "dq", "dk", "dv")


def _cases(seed: int, least: int = 33, most: int = 47) -> list[Case]:
    draw = generator(seed)
    n, more, odd = draw.randint(least, most), draw.randint(5, 19), draw.choice((19, 24, 40))
    square, shared, alone = sizes(1, 2, 2, n, n, 16), sizes(2, 4, 2, n, n + more, odd), sizes(1, 2, 1, n, n + more, odd)
    one_head = sizes(1, 1, 1, n, n, 16)
    plans: list[tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = [
        ("output only", square, {"upstream": "o"}, {}),
        ("output only", square, {"upstream": "o", "causal": True}, {}),
        ("both", square, {}, {}),
        ("logsumexp only", square, {"upstream": "lse"}, {}),
        ("shared heads", {**shared, "B": 1}, {"causal": True}, {}),
        ("given scale", one_head, {"scale": 0.41}, {}),
        ("given scale", one_head, {"scale": -0.2, "causal": True}, {}),
        ("fewer queries than keys", sizes(1, 1, 1, n, n + more, odd), {"causal": True}, {}),
        ("more queries than keys", sizes(1, 1, 1, n + more, n, odd), {"causal": True}, {}),
        ("no gradient where no key", sizes(1, 1, 1, n + more, n, 16), {"causal": True}, {}),
        ("one element", sizes(1, 1, 1, 1, 1, 16), {}, {}),
        ("no element", sizes(0, 2, 2, n, n, 16), {}, {}),
        ("more queries than keys, no mask", sizes(1, 1, 1, n + more, n, odd), {}, {}),
        ("heads last", shared, {}, {"layout": shapes.HEADS_LAST}),
        ("gradient of a sum", one_head, {"upstream": "o"}, {}),
        *((f"only {name} asks", one_head, {"asks": name}, {}) for name in "qkv"),
        ("each its own strides", square, {"causal": True}, {"layout": shapes.MIXED}),
        ("two forward passes", one_head, {"between": True}, {}),
        ("float16", alone, {"causal": True}, {"dtype": shapes.FP16}),
        ("bfloat16", alone, {}, {"dtype": shapes.BF16}),
        ("logsumexp only", alone, {"upstream": "lse"}, {"dtype": shapes.BF16}),  # zeros of o's dtype take dO's place
    ]
    return [Case(kind, named, options=options, seed=seed, **more) for kind, named, options, more in plans]


def _is_gradient(e: Evidence) -> bool:
    return e.difference.name in ("dq", "dk", "dv")


def _swap(names: tuple[str, str]) -> Callable[[Evidence], bool]:
    """Whether two gradients stand in each other's place."""

    def applies(e: Evidence) -> bool:
        places = [_OUTPUTS.index(name) for name in names]
        if e.position not in places:
            return False
        other = places[1 - places.index(e.position)]
        return e.close(e.trial.targets[other].right)

    return applies


def _with(cause: str, place: int, where: Callable[[Evidence], bool] | None = None, **flags: Any) -> Diagnosis:
    """A rule: the gradients are those of another step of the backward pass."""

    def applies(e: Evidence) -> bool:
        if not _is_gradient(e) or (where is not None and not where(e)):
            return False
        q, k, v, do, dlse = e.args64
        upstream = e.case.options.get("upstream", "both")
        do = torch.zeros_like(do) if upstream == "lse" else do
        given = {"dlse": None if upstream == "o" else dlse, **flags}
        given = {name: value(e) if callable(value) else value for name, value in given.items()}
        options = {name: value for name, value in e.case.options.items() if name in ("causal", "scale")}
        options |= {name: given.pop(name) for name in ("causal", "scale") if name in given}
        return e.close(walk.gradients(q, k, v, do, **options, **given)[e.position - 2])

    return Diagnosis(applies, classic(cause, place))


def _default_scale(e: Evidence) -> bool:
    """Whether the backward pass computes with 1/sqrt(D) in place of the scale that was given."""
    given = e.case.options.get("scale")
    if given is None or not _is_gradient(e):
        return False
    q, k, v, do, dlse = e.args64
    ratio = q.shape[-1] ** -0.5 / given
    causal = bool(e.case.options.get("causal"))
    found = walk.gradients(q, k, v, do, causal, given, score_factor=ratio, dlse=dlse)[e.position - 2]
    return e.close(found if e.difference.name == "dv" else found * ratio)


def _default_scale_forward(e: Evidence) -> bool:
    """Whether the forward pass computes with 1/sqrt(D) in place of the scale that was given."""
    if e.case.options.get("scale") is None or _is_gradient(e):
        return False
    return e.close(shapes.attention(*e.args64[:3], causal=bool(e.case.options.get("causal")))[e.position])


def _not_causal_forward(e: Evidence) -> bool:
    """Whether the forward pass computes without the mask that was asked for."""
    if not e.case.options.get("causal") or _is_gradient(e):
        return False
    return e.close(shapes.attention(*e.args64[:3], scale=e.case.options.get("scale"))[e.position])


def _forward_alone(e: Evidence) -> bool:
    """Whether the ``flash_forward`` whose kernel ran gives the right output and logsumexp by itself."""
    launch = next(launch for launch in e.trial.profile.launches if launch.kernel == forward.FORWARD)
    options = {name: value for name, value in e.case.options.items() if name in ("causal", "scale")}
    found = sys.modules[launch.function.__module__].flash_forward(*e.trial.args[:3], **options)
    return not difference("", found[e.position], e.trial.targets[e.position]).count


_RAISED = {
    "incorrect number of gradients": classic(
        "backward returns one gradient for each input of forward, None for causal and scale", 1
    )
}
_MISTAKES = (
    Diagnosis(
        lambda e: e.only(lambda case: bool(case.options.get("between"))),
        classic(
            "only a forward pass that another one follows goes wrong: what it keeps belongs to its own ctx, and is "
            "overwritten elsewhere",
            8,
        ),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: len(case.options.get("asks", "qkv")) == 1),
        classic(
            "wrong only where one input asks for its gradient: needs_input_grad has a flag for each, in their order",
            1,
        ),
    ),
    Diagnosis(
        _swap(("dk", "dv")),
        classic(
            "dk and dv stand in each other's place: backward returns gradients in the order of forward's inputs", 1
        ),
    ),
    Diagnosis(
        _swap(("dq", "dk")),
        classic(
            "dq and dk stand in each other's place: backward returns gradients in the order of forward's inputs", 1
        ),
    ),
    Diagnosis(
        lambda e: (
            bool((e.got.isnan() & ~e.right.isnan()).any()) and e.only(lambda c: c.kind == "no gradient where no key")
        ),
        classic(
            "queries that see no key pass on a NaN that arrives for their logsumexp: tell attention_delta how many "
            "see no key, max(0, Nq - Nk) when causal",
            5,
        ),
    ),
    _with(
        "the gradient that arrives for the logsumexp is ignored: hand dlse to attention_delta",
        4,
        where=lambda e: e.case.options.get("upstream", "both") != "o",
        dlse=None,
    ),
    _with(
        "the gradient of the logsumexp has the wrong sign",
        4,
        where=lambda e: e.case.options.get("upstream", "both") != "o",
        dlse=lambda e: -e.args64[4],
    ),
    _with(
        "delta is missing in the backward pass",
        6,
        where=lambda e: not e.only(lambda case: bool(case.options.get("causal"))),
        delta="none",
    ),
    _with(
        "delta is 0 in causal attention alone: too many queries are taken to see no key, max(0, Nq - Nk) of them do",
        5,
        where=lambda e: e.only(lambda case: bool(case.options.get("causal"))),
        delta="none",
    ),
    _with(
        "the backward pass forgets that attention was causal: keep causal on ctx",
        2,
        where=lambda e: bool(e.case.options.get("causal")),
        shift="none",
    ),
    Diagnosis(_default_scale, classic("the backward pass forgets the scale that was given: keep it on ctx", 2)),
    _with(
        "too many queries are taken to see no key: max(0, Nq - Nk) of them, and only when causal",
        5,
        blind=lambda e: abs(e.case.sizes["Nq"] - e.case.sizes["Nk"]),
    ),
    Diagnosis(
        _default_scale_forward,
        classic("the scale that was given does not reach the forward kernel", 2),
    ),
    Diagnosis(
        _not_causal_forward,
        classic("causal does not reach the forward kernel", 2),
    ),
    Diagnosis(
        lambda e: _is_gradient(e) and bool((e.got == 0).all()),
        classic("this gradient is zero: is it computed, from the dO that arrives, and returned?", 1),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "gradient of a sum" or case.layout != "contiguous"),
        classic("only tensors that are not contiguous go wrong: dO may have strides of 0", 3),
    ),
    *tiles.only_where({"heads": 3}),
    Diagnosis(
        lambda e: not _is_gradient(e) and _forward_alone(e),
        "flash_forward is right on these inputs: look at what FlashAttention.forward hands to it, and returns",
    ),
    Diagnosis(
        lambda e: not _is_gradient(e), "the forward pass is wrong, and flash_forward by itself is: see exercise 3.4"
    ),
    Diagnosis(
        _is_gradient,
        "the forward pass is right. If exercises 3.5 to 3.7 pass too, look at what backward hands to them: the "
        "tensors in the order in which they were saved, a dO of zeros where none arrives, and delta from o, do, dlse "
        "and the number of queries that see no key",
    ),
)


def _observe_operator(package: ModuleType, seed: int) -> dict[str, Observation]:
    def run(lab: ModuleType) -> Attention:
        return training.stepping(lab.flash_attention_with_lse, lab.flash_attention, {})

    observed = tried("3.8", "flash_attention_with_lse", _OUTPUTS, lambda s: _cases(s, 9, 14), training.inputs, run)(
        package, seed
    )
    q, k, v = (x.detach() for x in shapes.qkv(Case("one gradient", sizes(1, 1, 1, 12, 12, 16), seed=seed)))
    (dk,) = torch.autograd.grad(package.flash_attention(q, k.requires_grad_(), v, True, 0.3).sum(), k)
    return observed | {"dk of flash_attention where only k asks for its gradient": dk}


FLASH_ATTENTION = Exercise(
    "3.8",
    "autograd function",
    points=12,
    builds_on=("3.4", "3.5", "3.6", "3.7"),
    observe=_observe_operator,
    tolerance=hidden.ATTENTION,
)


@FLASH_ATTENTION.checked_by
def check_flash_attention(
    flash_attention: Attention, flash_attention_with_lse: Attention, seed: int | None = None
) -> None:
    """Exercise 3.8: attention as an operator: output and logsumexp, both differentiable.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    kept: dict[int, training.Kept] = {}
    tiling = forward.tiling(forward.FORWARD)
    check_kernel(
        FLASH_ATTENTION,
        training.stepping(flash_attention_with_lse, flash_attention, kept),
        training.reference,
        _cases(seed),
        training.inputs,
        outputs=_OUTPUTS,
        atol=gradients.ROUNDING,
        tiling={**tiling, "dq": tiling["o"]},
        inspections=[no_atomics, training.keeps_little(kept), training.notices_changes(flash_attention_with_lse, kept)],
        forbidden=replace(forward.RULES, place=7),
        diagnose=_MISTAKES,
        raised=_RAISED,
        compiled=None,
        speed=Speed(_training_step, _peer_step, 0.5, "PyTorch's FlashAttention-2, forward and backward"),
        seed=seed,
        notice="five tensors wait for the backward pass, and none of them has Nq x Nk elements",
    )


def _training_step() -> tuple[Any, ...]:
    q, k, v, causal = forward.large(True)
    do = torch.randn_like(q)
    dlse = torch.zeros(q.shape[:3], device=q.device)
    return q, k, v, do, dlse, causal, None, "timed"


def _peer_step(q, k, v, do, dlse, causal, scale, upstream):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(forward.flash_peer(q, k, v, causal), (q, k, v), do)


def _need_both_places(kernels: ModuleType) -> None:
    """Look whether the places of the anchored loop are filled.

    Raises:
        NotImplementedError: of the first place of that loop that is still to be filled.
    """
    for name in ("masked_scores", "anchored_row"):
        source = textwrap.dedent(inspect.getsource(getattr(kernels, name).fn))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raise NotImplementedError(*(ast.literal_eval(argument) for argument in node.exc.args))


def _tried(kernels: ModuleType, tuning: ModuleType) -> forward.Forward:
    """The forward pass of these modules, with its anchored loop."""

    def flash_forward(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with anchored(tuning):
            return kernels.flash_forward(*args, **options, anchored=True)

    return flash_forward


def _anchored_cases(seed: int, blocks: Mapping[torch.dtype, tuple[int, int]]) -> list[Case]:
    """Those of exercises 3.3 and 3.4, scores that outgrow the first tile's maximum or nearly do, and large values.

    A GPU, for which each is compiled in seconds, has every third of the former. ``blocks``: the tile, (queries, keys),
    that each dtype takes. Only past the first tile of keys can anything outgrow it.
    """
    kinds = [("outgrown", torch.float32), ("outgrown by 88", torch.float32), ("grown by 30", torch.float32)]
    kinds += [("outgrown", shapes.BF16), ("outgrown by 40", shapes.FP16), (shapes.LARGE, torch.float32)]
    kinds += [(shapes.TOGETHER, torch.float32)]
    past = {dtype: (2 * block_m + 3, 3 * block_n + 5) for dtype, (block_m, block_n) in blocks.items()}
    block_m, block_n = blocks[torch.float32]
    blind = sizes(1, 1, 1, 3 * block_m, block_m // 2 + 1, 16)
    former = [*shapes.drawn(seed, block_m, block_n, causal=False), *forward.causal_cases(seed, block_m, block_n)]
    return [
        *runtime.pick(cpu=former, gpu=former[seed % 3 :: 3]),
        Case("a tile without keys", blind, options={"causal": True}, seed=seed),
        Case("last key alone", sizes(1, 1, 1, block_m, 2 * block_n + 1, 16), seed=seed),
        # the first tile of queries ends where the first key begins
        Case("no key by one", sizes(1, 1, 1, 2 * block_m + 3, block_m + 3, 16), options={"causal": True}, seed=seed),
        Case(shapes.LOW, sizes(1, 1, 1, *past[torch.float32], 16), seed=seed),
        *(Case(kind, sizes(1, 2, 1, *past[dtype], 16), dtype, seed=seed) for kind, dtype in kinds),
    ]


def _moved(tuning: ModuleType) -> Callable[[CaseResult], Problem | None]:
    """An inspection: q is read and o and L are written once; keys and values once, or twice where an anchor fails."""

    def inspect(trial: CaseResult) -> Problem | None:
        case = trial.case
        if trial.profile is None or not case.numel(*case.sizes):
            return None
        found = launched([trial], forward.FORWARD)
        if found is None:
            return never_launched(forward.FORWARD, trial)
        once = case.numel("B", "Hq", "D") * case.element_size
        once *= forward.keys_read(case, found["BLOCK_M"], found["BLOCK_N"])
        tried = compiles_anchored(case.dtype, tuning.capability_of(runtime.DEVICE))
        twice_at_least = tried and case.kind in ("outgrown", "outgrown by 40", shapes.LARGE, shapes.TOGETHER)
        twice_at_most = twice_at_least or case.kind == "outgrown by 88" or case.magnitude > 1
        least, most = once * (1 + twice_at_least), once * (1 + twice_at_most)
        by_argument = next(x for x in trial.profile.launches if x.kernel == forward.FORWARD).by_argument
        for name in ("k_ptr", "v_ptr"):
            read = by_argument[name].bytes_loaded if name in by_argument else 0
            if not least <= read <= most:
                return Problem(f"{name}: {read:,} bytes loaded, {least:,} expected", _why(case, read, once, least))
        rows = case.numel("B", "Hq", "Nq")
        queries = rows * case.sizes["D"] * case.element_size
        for name, what, bytes_expected in (
            ("q_ptr", "loaded", queries), ("o_ptr", "stored", queries), ("lse_ptr", "stored", 4 * rows)
        ):  # fmt: skip
            moved = getattr(by_argument[name], f"bytes_{what}") if name in by_argument else 0
            if moved != bytes_expected:
                return Problem(f"{name}: {moved:,} bytes {what}, {bytes_expected:,} expected", "once is enough")
        return None

    return inspect


def _why(case: Case, read: int, once: int, least: int) -> str:
    if read < least:
        return classic("scores outgrow the anchor, and only one of the two loops has run", 4)
    if case.kind == shapes.NEGATIVE:
        return classic("with a negative scale each row is computed again: scale before the mask and the maximum", 6)
    if read == 2 * once:
        return classic("each row is computed again although nothing overflowed", 4)
    if case.options.get("causal"):
        return classic(
            "the loop does not end with the last key that a query of the tile sees, or a tile is loaded before or "
            "behind it where none is seen",
            5,
        )
    return classic("some rows are computed again although nothing overflowed", 4)


def _as(e: Evidence, **mistake: Any) -> bool:
    """Whether the answer is that of the anchored loop with a mistake, see :func:`walk.anchored`."""

    def computed(e: Evidence) -> Tensor:
        return walk.anchored(*e.args64[:3], **e.case.options, **mistake, **tiles.blocks(e, forward.FORWARD))[e.position]

    return explains(e, computed)


def _only_several_tiles(e: Evidence) -> bool:
    """Whether rows of one tile of keys are right, in each dtype's tile, and longer ones go wrong."""
    blocks = [(launched([trial, *e.trials], forward.FORWARD) or {})["BLOCK_N"] for trial in e.trials]
    one = [trial.failed for trial, block in zip(e.trials, blocks) if 0 < trial.case.sizes["Nk"] <= block]
    return bool(one) and not any(one)


_OUTGROWN = (*shapes.GROWTHS, shapes.LARGE, shapes.TOGETHER)
_ANCHOR_MISTAKES = (
    Diagnosis(
        lambda e: e.difference.name == "lse",
        classic(
            "only the logsumexp goes wrong: m_i is the number that was subtracted, in the unit of the inner loop, and "
            "l_i the sum",
            7,
        ),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind in _OUTGROWN or case.magnitude > 1),
        classic(
            "only scores that outgrow the first tile's maximum go wrong: are l_i and acc checked, behind the loop?", 3
        ),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind in (shapes.LOW, shapes.VERY_LOW)),
        classic("only low scores go wrong: the anchor is each row's own maximum over its first tile", 3),
    ),
    Diagnosis(
        lambda e: _as(e, values="own"),
        classic("a step adds the values of its own tile: p belongs to the tile before", 1),
    ),
    Diagnosis(
        lambda e: _as(e, values="none of the last") or _as(e, values="none of the last, but its sum"),
        classic("the last tile is missing: its values are added behind the loop", 2),
    ),
    Diagnosis(
        lambda e: _as(e, values="early"),
        classic(
            "the values of the last tile are taken from key_end - BLOCK_N on: it begins at a multiple of BLOCK_N", 2
        ),
    ),
    Diagnosis(
        lambda e: _as(e, unmasked="first"),
        classic("the first tile of scores goes without the causal mask", 5),
    ),
    Diagnosis(
        lambda e: _as(e, unmasked="past the end") or _as(e, unmasked="all"),
        classic("keys past the last one count with score 0, which is -inf", 5),
    ),
    *tiles.only_where({"negative": 6, "empty": 5}),
    Diagnosis(
        lambda e: e.only(lambda case: bool(case.options.get("causal"))),
        classic(
            "only causal attention goes wrong: the mask, the tiles that the loop takes, or the last tile behind it", 5
        ),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: bool(case.options.get("causal")) or case.kind not in ("one tile", "whole tiles")),
        "no case of one tile or of whole tiles fails without a causal mask: look at whatever depends on key_end or on "
        "Nk: where the loop ends, what is masked, and each line for the last tile, behind the loop",
    ),
    Diagnosis(
        _only_several_tiles,
        "only rows of more than one tile go wrong: look at where the first tile begins, at each line of the loop and "
        "its range, and at what is added behind the loop",
    ),
)


def _observe_anchored(package: ModuleType, seed: int) -> dict[str, Observation]:
    """A third of the cases of the check, all that outgrow the anchor, and both timed head dimensions."""
    blocks = dict.fromkeys((torch.float32, shapes.BF16, shapes.FP16), (16, 16))

    def cases(drawn: int) -> list[Case]:
        former = [c for c in hidden.comparable(_anchored_cases(drawn, blocks)) if c.kind != shapes.DRIFTING]
        outgrown = [c for c in former if c.kind in _OUTGROWN or c.kind == shapes.LOW]
        return former[drawn % 3 :: 3] + outgrown + _timed_widths(drawn, 34, 60)

    with anchored(importlib.import_module(f"{package.__name__}.tuning")):
        return tried("3.9", "flash_attention_with_lse", ("o", "lse"), cases, shapes.qkv)(package, seed)


def _timed_widths(seed: int, least: int, most: int) -> list[Case]:
    """Ragged lengths of both head dimensions that are timed, in 16 bits, causal and not."""
    draw = generator(seed)
    lengths = [(head_dim, draw.randint(least, most)) for head_dim in (64, 128)]
    return [
        Case("ragged", sizes(1, 1, 1, n, n, head_dim), dtype, options={"causal": causal}, seed=seed)
        for head_dim, n in lengths
        for dtype in (shapes.BF16, shapes.FP16)
        for causal in (False, True)
    ]


SPEED = Exercise(
    "3.9",
    "speed challenge",
    points=6,
    builds_on=("3.4", "3.8"),
    observe=_observe_anchored,
    tolerance=hidden.ATTENTION,
    tolerances={f"o of flash_attention_with_lse, {shapes.LOW}": hidden.LOW},
)


@SPEED.checked_by
def check_speed(flash_attention: Attention, seed: int | None = None) -> None:
    """Exercise 3.9: the anchored loop, and the forward pass beside PyTorch's FlashAttention-2, for two head dimensions.

    The loop is tried through ``flash_forward`` of the same package, output and logsumexp. ``flash_attention`` is then
    held to the right output and timed with the tiles of the table, on a GPU.

    Raises:
        CheckFailed: the answer is wrong or too slow; the text says where and why.
    """
    seed = draw_seed(seed)
    package = flash_attention.__module__.rpartition(".")[0]
    kernels, tuning = (importlib.import_module(f"{package}.{name}") for name in ("flash_forward", "tuning"))
    tried = _tried(kernels, tuning)
    blocks = {
        x: forward.blocks_of(tried, *forward.small(x), kernel=forward.FORWARD)
        for x in (torch.float32, shapes.BF16, shapes.FP16)
    }
    _need_both_places(kernels)
    tiling = forward.tiling(forward.FORWARD)
    ragged = _timed_widths(seed, *runtime.pick(cpu=(34, 60), gpu=(130, 200)))  # past three tiles
    check_kernel(
        SPEED.part("anchored loop"),
        tried,
        shapes.attention,
        [*_anchored_cases(seed, blocks), *ragged],
        shapes.qkv,
        outputs=("o", "lse"),
        tiling=tiling,
        inspections=[_moved(tuning), forward.alone(forward.FORWARD)],
        forbidden=forward.RULES,
        diagnose=_ANCHOR_MISTAKES,
        atol=gradients.ROUNDING,
        compiled=Compiled(
            tf32=11,
            wide=11,
            further=lambda: launched_on_hopper(tried, forward.small(shapes.BF16), forward.FORWARD, of=flash_attention),
            further_cause=classic(DESCRIBED, 12),
        ),
        seed=seed,
        notice="a row's first maximum serves for all of it; a row that outgrows it is computed again",
    )
    for head_dim in (64, 128):
        check_kernel(
            SPEED.part(f"speed challenge, D = {head_dim}"),
            flash_attention,
            lambda *args, **options: shapes.attention(*args, **options)[0],
            [case for case in ragged if case.sizes["D"] == head_dim],
            shapes.qkv,
            outputs=("o",),
            tiling={"o": tiling["o"]},
            forbidden=forward.RULES,
            compiled=None,
            speed=Speed(
                lambda head_dim=head_dim: forward.large(True, head_dim),
                forward.flash_peer,
                0.9,
                "PyTorch's FlashAttention-2",
            ),
            seed=seed,
            notice="causal, bfloat16, 16,384 tokens: the loop and the tile decide, the algorithm is the same",
        )
