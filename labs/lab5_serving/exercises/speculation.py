"""The check of exercise 5.6: speculative sampling keeps the target's distribution, and its loop the target's text."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from utils.checks.core import Exercise, classic
from utils.chi_square import chi_square

from . import hidden_sampling
from .sampling_rules import MISTAKES, RIGHT, Distribution, distance, drawn_rows, left_over
from .scenarios import CheckMismatch, CheckScenario, check_scenarios
from .speculative_scenario import KEPT, drafts_are_dropped

Answer = Mapping[str, Callable]

SAMPLES = 2000
#: How far a mistake's distribution must be from the right one, as total variation, to be seen in so many samples.
CLEAR = 0.12
#: p-values: below the first the samples are wrong; above the second a mistake explains them.
WRONG, EXPLAINED = 1e-9, 1e-4


# ---- the residual
def _residual(answer: Answer, rng: random.Random) -> None:
    shape = rng.choice(((5,), (3, 4), (2, 3, 6), (1, 7)))
    p, q = drawn_rows(rng, *shape).float(), drawn_rows(rng, *shape).float()
    if len(shape) > 1:
        q[0] = p[0]  # nothing is left of the first row
    right = _by_row(p, q, left_over)
    mine = p.clone(), q.clone()
    got = answer["residual"](*mine)
    if not torch.equal(mine[0], p) or not torch.equal(mine[1], q):
        raise CheckMismatch("residual changes its arguments in place", "the caller still needs them")
    if not isinstance(got, Tensor) or got.shape != p.shape:
        shown = f"a tensor of {tuple(got.shape)}" if isinstance(got, Tensor) else repr(got)
        raise CheckMismatch(f"residual gives {shown}", f"expected {tuple(p.shape)}, the shape of its arguments")
    dtype, got = got.dtype, got.double()
    if torch.allclose(got, right, rtol=1e-5, atol=1e-7):
        if dtype != torch.float64:
            raise CheckMismatch(
                f"residual gives {dtype}", "expected torch.float64: convert p and q before the difference"
            )
        if not torch.allclose(got, right, rtol=1e-12, atol=1e-14):
            headline = f"residual is off by {(got - right).abs().max():.1e}, float64 errs by less than 1e-14"
            raise CheckMismatch(headline, "convert p and q to float64 before the difference, not its result")
        return
    p64, q64 = p.double(), q.double()
    kept = (p64 - q64).clamp(min=0)
    some = kept.sum(-1) > 0  # rows of which something is left
    cause = ""
    if bool(got.isnan().any()) and torch.allclose(got.nan_to_num(0), right * (kept.sum(-1, keepdim=True) > 0)):
        cause = classic("where p equals q nothing is left, and 0 / 0 is no number: give p there", 3)
    for wrong, text in (
        (kept, "max(p - q, 0) is not divided by its sum: it is no distribution yet"),
        (kept / kept.sum(), "each row is divided by its own sum, not by that of all"),
        ((p64 - q64) / kept.sum(-1, keepdim=True), "p - q is not clipped: a probability is never negative"),
        (p64 - q64, "p - q is neither clipped nor divided by its sum"),
        (_by_row(p, q, lambda a, b: (a - b).abs() / (a - b).abs().sum() if (a - b).abs().sum() > 0 else a),
         "this is |p - q|: where the draft has too much, nothing is missing"),
        (_by_row(q, p, left_over), "p and q stand in each other's place: max(p - q, 0)"),
        (p64, "this is the target's distribution itself"),
        (q64, "this is the draft's distribution"),
    ):  # fmt: skip
        if not cause and torch.allclose(got[some].nan_to_num(0), wrong[some].nan_to_num(0), rtol=1e-4, atol=1e-6):
            cause = classic(text, 3)
    total = got.sum(-1)
    raise CheckMismatch(
        "the residual distribution is wrong",
        cause,
        f"rows sum to {total.min():.4g} .. {total.max():.4g}, smallest entry {got.min():.4g}",
        f"p, q of shape {tuple(p.shape)}; the first rows are equal: expected p there"
        if len(shape) > 1
        else f"p, q of shape {tuple(p.shape)}",
    )


def _by_row(p: Tensor, q: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows = zip(p.double().reshape(-1, p.shape[-1]), q.double().reshape(-1, p.shape[-1]), strict=True)
    return torch.stack([function(*row) for row in rows]).reshape(p.shape)


# ---- one call
def _call(answer: Answer, p: Tensor, q: Tensor, drafted: list[int], generator: torch.Generator) -> tuple[int, ...]:
    """One result, its form judged."""
    mine = p.clone(), q.clone(), torch.tensor(drafted, dtype=torch.int64)
    got = answer["speculative_sample"](*mine, generator)
    if not torch.equal(mine[0], p) or not torch.equal(mine[1], q) or mine[2].tolist() != drafted:
        raise CheckMismatch("speculative_sample changes its arguments in place", "the caller still needs them")
    if not isinstance(got, list) or not all(isinstance(token, int) for token in got):
        raise CheckMismatch(
            f"speculative_sample returns {got!r}", "expected a list of ints: the accepted tokens and one more"
        )
    return tuple(got)


def _certain(answer: Answer, rng: random.Random) -> None:
    """Distributions that leave nothing to chance, or nearly nothing."""
    generator, size, k = torch.Generator().manual_seed(rng.getrandbits(60)), rng.randint(3, 6), rng.randint(1, 4)
    # the target knows its tokens for certain: the draft is right up to a place
    sure = [rng.randrange(size) for _ in range(k + 1)]
    p = torch.nn.functional.one_hot(torch.tensor(sure), size).float()
    for agree in range(k + 1):
        drafted = [*sure[:agree], *((token + 1) % size for token in sure[agree:k])]
        q = 0.5 * torch.nn.functional.one_hot(torch.tensor(drafted), size).float() + 0.5 / size
        got, expected = _call(answer, p, q, drafted, generator), tuple(sure[: agree + 1])
        if got != expected:
            _told(got, expected, drafted, f"the target gives each of the tokens {sure} for certain")
    # nothing is drafted
    got = _call(answer, p[:1], q[:0], [], generator)
    if got != (sure[0],):
        _told(got, (sure[0],), [], "nothing is drafted")
    # target and draft agree: all is accepted, whatever the numbers are
    p = drawn_rows(rng, k + 1, size).float()
    for _ in range(20):
        drafted = [int(row.multinomial(1, generator=generator)) for row in p[:-1]]
        got = _call(answer, p, p[:-1], drafted, generator)
        if got[:-1] != tuple(drafted):
            _told(got, (*drafted, "and one more"), drafted, "target and draft have the same distributions")


def _told(got: tuple, expected: tuple, drafted: list[int], where: str) -> None:
    if len(got) > len(expected) or (len(got) == len(expected) and got[:-1] != expected[:-1]):
        cause = classic("what stands behind the first rejected token is dropped, and that token replaced", 5)
    elif len(got) == len(drafted) and got == tuple(drafted):
        cause = classic("after k accepted tokens one more comes from the target's last row: it is free", 4)
    elif len(got) < len(expected):
        cause = classic("accept with probability min(1, p/q), which is 1 where the target is sure of the token", 1)
    else:
        cause = classic("a rejected token is replaced from max(p - q, 0), what comes after k tokens from row k", 2)
    expected_text = ", ".join(map(str, expected))
    raise CheckMismatch(f"of the drafted tokens {drafted} come {list(got)}, expected [{expected_text}]", cause, where)


# ---- many calls
def _between(rng: random.Random, k: int, size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Distributions and drafted tokens that tell right from wrong, and one mistake from another.

    All but one of several drafted tokens are accepted now and then; the other one always, although it is neither the
    target's likeliest token nor as likely in the draft.
    """
    while True:
        p, q = drawn_rows(rng, k + 1, size), drawn_rows(rng, k, size)
        drafted = [rng.choice((q[i] > 0).nonzero().flatten().tolist()) for i in range(k)]
        stays = [float(p[i, x] / q[i, x]) for i, x in enumerate(drafted)]
        sometimes = sum(0.3 < share < 0.75 for share in stays)
        always = sum(share > 1.4 and x != int(p[i].argmax()) for i, (share, x) in enumerate(zip(stays, drafted)))
        if sometimes + always < k or sometimes < max(1, k - 1) or (k > 1 and always < 1):
            continue
        right, *wrong = (rule.distribution(p, q, drafted) for rule in (RIGHT, *(rule for rule, *_ in MISTAKES)))
        pairs = [(right, other) for other in wrong] + [(wrong[-1], other) for other in wrong[:-1]]
        if k == 1 or all(distance(*pair) > CLEAR for pair in pairs):
            return p.float(), q.float(), drafted


def _one_drafted(answer: Answer, rng: random.Random) -> None:
    _sampled(answer, rng, 1, rng.randint(3, 5))


def _several_drafted(answer: Answer, rng: random.Random) -> None:
    _sampled(answer, rng, 3, rng.randint(4, 6))


def _sampled(answer: Answer, rng: random.Random, k: int, size: int) -> None:
    """The results of many calls against their distribution."""
    p, q, drafted = _between(rng, k, size)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    counts = Counter(_call(answer, p, q, drafted, generator) for _ in range(SAMPLES))
    if _fits(counts, RIGHT.distribution(p, q, drafted)) >= WRONG:
        return
    found = [
        (_fits(counts, rule.distribution(p, q, drafted)), classic(text, number)) for rule, text, number in MISTAKES
    ]
    explained = [cause for fit, cause in sorted(found, key=lambda pair: -pair[0]) if fit > EXPLAINED]
    expected = RIGHT.distribution(p, q, drafted)
    worst = max({*expected, *counts}, key=lambda result: abs(counts[result] / SAMPLES - expected.get(result, 0.0)))
    raise CheckMismatch(
        f"the tokens do not have the target's distribution: {list(worst)} comes in {counts[worst] / SAMPLES:.1%} "
        f"of {SAMPLES:,} calls, in {expected.get(worst, 0.0):.1%} it should",
        "; or ".join(explained[:2]) if explained else _by_form(counts, drafted),
        f"k={k}, V={size}, drafted {drafted}; p/q of these: "
        + ", ".join(f"{float(p[i, x] / q[i, x]):.2f}" for i, x in enumerate(drafted)),
    )


def _by_form(counts: Counter, drafted: list[int]) -> str:
    """What the form of the results tells, where no known mistake has their distribution."""
    k = len(drafted)
    if all(len(result) == k + 1 for result in counts) and any(result[:k] != tuple(drafted) for result in counts):
        return classic("what stands behind a rejected token is still judged: it follows a token that is gone", 5)
    if any(result[:-1] != tuple(drafted[: len(result) - 1]) for result in counts):
        return classic("before the last token stand accepted ones, in their order, and nothing else", 5)
    return ""


def _fits(counts: Counter, expected: Distribution) -> float:
    """The p-value of samples under a distribution; 0 where something came that it does not know."""
    if any(expected.get(result, 0.0) <= 0 for result in counts):
        return 0.0
    results = [result for result, share in expected.items() if share > 0]
    if len(results) < 2:
        return 1.0
    shares = torch.tensor([expected[result] for result in results], dtype=torch.float64)
    return chi_square(torch.tensor([counts[result] for result in results]), shares).p_value


def _own_numbers(answer: Answer, rng: random.Random) -> None:
    """The request's own generator, and nothing else, decides."""
    p, q, drafted = _between(rng, 3, 5)
    seed, results, states = rng.getrandbits(60), [], []
    with torch.random.fork_rng(devices=[]):
        for global_seed in (1, 2):
            torch.manual_seed(global_seed)
            before, generator = torch.get_rng_state(), torch.Generator().manual_seed(seed)
            results.append([_call(answer, p, q, drafted, generator) for _ in range(40)])
            states.append(torch.equal(before, torch.get_rng_state()))
    if results[0] != results[1] or not all(states):
        cause = classic("pass the request's generator, or use the uniforms that are drawn from it", 7)
        raise CheckMismatch(
            "the result depends on PyTorch's global random numbers", cause, "same generator, another global seed"
        )


#: What the loop raises where a cache is longer than the text that it should hold: a pass has fewer tokens than rows.
_TOO_LONG = dict.fromkeys(("inconsistent with step sign", "got torch.FloatTensor", "the target has (k + 1, V)"), KEPT)
_SCENARIOS = (
    CheckScenario("the residual", _residual, times=8),
    CheckScenario("several drafted tokens", _several_drafted, times=2),
    CheckScenario("one drafted token", _one_drafted),
    CheckScenario("nothing left to chance", _certain, times=4),
    CheckScenario("the request's own numbers", _own_numbers),
    CheckScenario("greedy text by drafts", drafts_are_dropped, _TOO_LONG, times=4),
)


@contextmanager
def _without_its_twin(speculative_sample: Callable) -> Iterator[None]:
    """The module's ``verify``, which does the same for many sequences, refuses to work meanwhile."""
    module = sys.modules.get(getattr(speculative_sample, "__module__", ""))
    twin = getattr(module, "verify", None)

    def refuse(*args: object, **kwargs: object) -> None:
        raise CheckMismatch("verify is this exercise for many sequences at once: write speculative_sample without it")

    if twin is not None:
        module.verify = refuse
    try:
        yield
    finally:
        if twin is not None:
            module.verify = twin


SPECULATIVE_SAMPLING = Exercise(
    "5.6",
    "speculative sampling",
    points=14,
    observe=hidden_sampling.speculative_sampling,
)


@SPECULATIVE_SAMPLING.checked_by
def check_speculative_sampling(
    speculative_sample: Callable, residual: Callable, speculative_generate: Callable, seed: int | None = None
) -> None:
    """Exercise 5.6: accept, replace and add, and drop what was rejected.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    with _without_its_twin(speculative_sample):
        check_scenarios(
            SPECULATIVE_SAMPLING,
            {
                "speculative_sample": speculative_sample,
                "residual": residual,
                "speculative_generate": speculative_generate,
            },
            _SCENARIOS,
            seed,
            f"{3 * SAMPLES:,} results have the target's distribution; the greedy text is the target's own",
        )
