"""Shared-prefix attention: float64's results, groups that save the most, exact traffic, the engine's own tokens."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from paged_cases import LAYOUTS, Paged, assert_close, normal, paged, peer, right
from parameters import few_on_hopper, thorough_but
from test_lab6_engine import wide_model
from token_identity import WatchedRunner, draw_workload, play, tiny_model

from solutions.lab5_serving import Engine, tuning
from solutions.lab5_serving.batch import TableRows
from solutions.lab5_serving.paged_decode import paged_attention_decode
from solutions.lab6_frontiers import shared_prefix_torch
from solutions.lab6_frontiers.shared_prefix import Group, find_groups, kv_bytes_read, partial_bytes, whole_blocks
from solutions.lab6_frontiers.shared_prefix_attention import (
    prefix_loads,
    shared_prefix_attention,
    shared_prefix_kernel,
    tile_of,
)
from solutions.lab6_frontiers.shared_prefix_batch import ROOM, share
from solutions.lab6_frontiers.shared_prefix_runner import SharedPrefixRunner
from utils import runtime
from utils.checks import cases
from utils.compile_only import Request, resource_usages
from utils.kernel_profile import profile_kernel
from utils.serving import SamplingParams

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = runtime.pick(cpu=16, gpu=64)


def on_device(values):
    return torch.tensor(values, dtype=torch.int32, device=runtime.DEVICE)


class Shared:
    """Requests in groups: each prefix and each suffix is a sequence of its own in one cache.

    Args:
        groups: (blocks of the prefix, suffixes of its requests in tokens) of each; no blocks: nothing is shared.
    """

    def __init__(self, groups, block_size=4, seed=0, **settings):
        self.prefixes, self.group_of = [blocks * block_size for blocks, _ in groups], []
        order = [c for c, (_, suffixes) in enumerate(groups) for _ in suffixes]
        random.Random(seed).shuffle(order)  # the members of a group stand anywhere in the step
        left = [list(suffixes) for _, suffixes in groups]
        self.group_of, self.suffixes = order, [left[c].pop(0) for c in order]
        self.given = paged([*self.prefixes, *self.suffixes], block_size=block_size, seed=seed, **settings)
        by_group = [[s for s, c in enumerate(order) if c == wanted] for wanted in range(len(groups))]
        starts = [0, *itertools.accumulate(map(len, by_group))]
        self.groups = on_device(starts), on_device([s for members in by_group for s in members])

    def arguments(self, q):
        J, given = len(self.prefixes), self.given
        suffixes, prefixes = (
            (given.block_tables[part], given.context_lens[part]) for part in (slice(J, None), slice(J))
        )
        return q, given.k_cache, given.v_cache, *suffixes, *prefixes, *self.groups

    def whole(self):
        """The same requests with their prefix before their suffix, as ordinary decode sees them."""
        J, given = len(self.prefixes), self.given
        width = given.block_tables.shape[1]
        tables = torch.full((len(self.group_of), 2 * width), 1 << 30, dtype=torch.int32)
        for s, c in enumerate(self.group_of):
            blocks = self.prefixes[c] // given.k_cache.shape[1]
            tables[s, :blocks] = given.block_tables[c, :blocks]
            tables[s, blocks : blocks + width] = given.block_tables[J + s]
        lens = [self.prefixes[c] + own for c, own in zip(self.group_of, self.suffixes, strict=True)]
        keys, values = (
            [torch.cat((x[c], x[J + s])) for s, c in enumerate(self.group_of)] for x in (given.keys, given.values)
        )
        return Paged(given.k_cache, given.v_cache, tables.to(runtime.DEVICE), on_device(lens), keys, values)


def drawn_groups(draw, block_size):
    groups = []
    for _ in range(draw.randint(1, 3)):
        blocks = draw.choice((0, 1, TILE // block_size + 1, draw.randint(1, 3 * TILE // block_size + 1)))
        groups.append((blocks, [draw.choice((0, 1, TILE, draw.randint(1, 40))) for _ in range(draw.randint(0, 9))]))
    return groups if any(suffixes for _, suffixes in groups) else [*groups, (2, [3])]


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", thorough_but(range(24), 0, 1, 2, 3, 4, 5))
def test_random_groups_err_no_more_than_twice_what_pytorch_does(number):
    draw, dtype = random.Random(f"shared prefixes {number}"), DTYPES[number % 3]
    D, G, group, block_size = draw.choice((16, 40, 64, 128)), draw.choice((1, 2)), draw.randint(1, 5), 1 << number % 5
    settings = {"G": G, "D": D, "block_size": block_size, "dtype": dtype, "layout": draw.choice(LAYOUTS)}
    given = Shared(drawn_groups(draw, block_size), seed=number, **settings)
    q = cases.with_layout(normal(len(given.suffixes), G * group, D, dtype=dtype, seed=number), "strided")
    exact, theirs = right(q, given.whole()), peer(q, given.whole())
    splits = {"prefix_splits": draw.choice((None, 1, 5)), "suffix_splits": draw.choice((None, 1, 3))}
    assert_close(shared_prefix_attention(*given.arguments(q), **splits), exact, theirs)
    assert_close(shared_prefix_torch.shared_prefix_attention(*given.arguments(q)), exact, theirs)


def test_it_is_ordinary_decode_of_the_whole_contexts():
    given = Shared([(9, [1, 7, 30, 16]), (3, [2, 2]), (0, [20])], D=64, block_size=16)
    q = normal(7, 4, 64)
    found = shared_prefix_attention(*given.arguments(q))
    assert_close(found, paged_attention_decode(q, *given.whole().cache).cpu().double())


def test_scores_far_apart_in_prefix_and_suffix_stay_finite():
    given = Shared([(4, [5, 9, 1])], D=16)
    given.given.k_cache[given.given.block_tables[0, :4].long()] *= 300
    given.given.keys[0] *= 300
    q = normal(3, 4, 16, seed=3)
    exact, theirs = right(q, given.whole()), peer(q, given.whole())
    for function in (shared_prefix_attention, shared_prefix_torch.shared_prefix_attention):
        assert_close(function(*given.arguments(q)), exact, theirs)


def test_a_scale_and_a_request_that_sees_nothing():
    given = Shared([(0, [0, 7]), (2, [0])], D=16)
    q = normal(3, 4, 16)
    exact = right(q, given.whole(), scale=-0.3)
    for function in (shared_prefix_attention, shared_prefix_torch.shared_prefix_attention):
        assert_close(function(*given.arguments(q), scale=-0.3), exact)
    nothing = next(s for s in range(3) if given.suffixes[s] == 0 and given.group_of[s] == 0)
    assert not shared_prefix_attention(*given.arguments(q))[nothing].any()


@pytest.mark.parametrize(
    ("index", "change", "error", "text"),
    [
        (0, torch.Tensor.double, TypeError, "q must be float32, float16 or bfloat16, got float64"),
        (3, lambda x: x[:1], ValueError, r"block_tables must have shape \(2, 3\) for 2 sequences"),
        (5, lambda x: x[0], ValueError, r"prefix_tables must have shape \(J, max_blocks\)"),
        (5, lambda x: x[:0], ValueError, r"prefix_lens must have shape \(0,\) for 2 requests in 0 groups"),
        (5, lambda x: x.repeat_interleave(2, 1)[:, ::2], ValueError, "rows of prefix_tables must be contiguous"),
        (6, torch.Tensor.float, TypeError, "prefix_lens must be int32 or int64, got float32"),
        (7, lambda x: x[:1], ValueError, r"group_starts must have shape \(2,\) for 2 requests in 1 groups"),
        (8, lambda x: x.repeat_interleave(2)[::2], ValueError, r"members must be contiguous, got strides \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(index, change, error, text):
    arguments = list(Shared([(2, [3, 4])], D=16).arguments(normal(2, 4, 16)))
    arguments[index] = change(arguments[index])
    with pytest.raises(error, match=text):
        shared_prefix_attention(*arguments)


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("requests", [3, 11])
def test_the_prefix_is_read_once_and_the_formula_says_what_both_ways_load(requests):
    """Once from memory, once per tile of rows by the programs; partial results are what the formula says, too."""
    G, group, D, block_size, splits = 2, 2, 32, 16, 2
    suffixes = [1 + 5 * s for s in range(requests)]
    given = Shared([(4, suffixes)], G=G, D=D, block_size=block_size)
    q, per_token = normal(requests, G * group, D), 2 * G * D * 4
    with profile_kernel(check_races=True) as shared:
        shared_prefix_attention(*given.arguments(q), prefix_splits=splits, suffix_splits=1)
    assert not shared.findings, shared.report()
    with profile_kernel() as ordinary:
        paged_attention_decode(q, *given.whole().cache, num_splits=1)
    loads = prefix_loads(requests, group, tile_of(D, q.dtype, group, runtime.DEVICE))
    assert loads == -(-requests // 8)
    prefix = 4 * block_size
    assert read(shared) == kv_bytes_read(prefix, suffixes, per_token, loads) < read(ordinary)
    assert read(ordinary) == kv_bytes_read(prefix, suffixes, per_token)
    assert from_memory(shared) == kv_bytes_read(prefix, suffixes, per_token, 1)
    written = sum(shared.by_argument[name].bytes_stored for name in ("o_ptr", "lse_ptr")) - q.numel() * 4
    by_merge = sum(shared.by_argument[name].bytes_loaded for name in ("outputs_ptr", "logsumexps_ptr"))
    lse = 4 * requests * G * group * (splits + 1)
    assert written == by_merge == requests * G * group * (splits + 1) * (D + 1) * 4
    assert written + by_merge + 2 * lse == partial_bytes(requests, G * group, D, splits + 1)  # 2: the LSEs side by side


def read(profile):
    return sum(profile.by_argument[name].bytes_loaded for name in ("k_cache_ptr", "v_cache_ptr"))


def from_memory(profile):
    return 32 * sum(profile.by_argument[name].dram_sectors_loaded for name in ("k_cache_ptr", "v_cache_ptr"))


# ---- groups ----------------------------------------------------------------------------------------------------------


def common_blocks(tables, whole, rows):
    least = min(whole[row] for row in rows)
    return next((i for i in range(least) if len({tables[row][i] for row in rows}) > 1), least)


def brute_force(tables, whole, min_requests, most):
    """Groups by the rule as it is stated, over all subsets of the requests left."""
    left, groups = set(range(len(tables))), []
    while len(groups) < most:
        subsets = (
            Group(rows, common_blocks(tables, whole, rows))
            for count in range(min_requests, len(left) + 1)
            for rows in itertools.combinations(sorted(left), count)
        )
        found = [group for group in subsets if group.blocks]
        if not found:
            break
        most_saved = max((group.saved, len(group.rows)) for group in found)
        found = [group for group in found if (group.saved, len(group.rows)) == most_saved]
        groups.append(min(found, key=lambda group: min(tables[row][: whole[row]] for row in group.rows)))
        left -= set(groups[-1].rows)
    return groups


def drawn_tables(draw, requests):
    """Tables that branch off each other: as a trie of physical blocks, no block at two places of it."""
    tables, fresh = [], itertools.count(1)
    for _ in range(requests):
        begin = draw.choice(tables)[: draw.randint(0, 6)] if tables and draw.random() < 0.8 else []
        tables.append(begin + [next(fresh) for _ in range(draw.randint(1, 4))])
    return tables


@pytest.mark.parametrize("seed", range(40))
def test_groups_are_those_that_save_most_among_all_subsets(seed):
    draw = random.Random(seed)
    tables = drawn_tables(draw, draw.randint(0, 9))
    whole = [draw.choice((len(table), len(table) - 1, draw.randint(0, len(table)))) for table in tables]
    least, most = draw.choice((2, 2, 3, 4)), draw.choice((1, 2, 8))
    padded = TableRows().update(tables) if tables else np.zeros((0, 16), np.int32)
    assert find_groups(padded, np.array(whole, int), least, most) == brute_force(tables, whole, least, most)


def test_the_block_of_the_newest_token_is_never_shared():
    assert whole_blocks(np.array([1, 16, 17, 32, 33]), 16).tolist() == [0, 0, 1, 1, 2]
    equal = TableRows().update([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    assert find_groups(equal, whole_blocks(np.array([33, 48, 40]), 16)) == [Group((0, 1, 2), 2)]
    assert find_groups(equal, whole_blocks(np.array([16, 16, 2]), 16)) == []


def test_a_request_that_leaves_early_does_not_cut_the_prefix_of_the_others():
    long = [[*range(100, 140), row] for row in range(9)]
    tables = TableRows().update([*long, [100, 7, 8]])
    assert find_groups(tables, np.array([41] * 9 + [3])) == [Group(tuple(range(9)), 40)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((np.zeros((2, 16), int), np.ones(2, int), 1), "min_requests must be at least 2, got 1"),
        ((np.zeros((2, 16), int), np.ones(3, int)), r"got shapes \(2, 16\) and \(3,\)"),
        ((np.zeros((2, 16), int), np.array([1, 17])), "tables have 16 columns, 17 blocks are to be shared"),
    ],
)
def test_tables_that_make_no_groups_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        find_groups(*arguments)


def test_a_shared_step_says_the_same_contexts_in_two_pieces():
    draw, block_size = random.Random(5), 4
    tables = drawn_tables(draw, 12)
    lens = np.array([draw.randint(len(t) * block_size - 3, len(t) * block_size) for t in tables], np.int32)
    padded = TableRows().update(tables)
    groups = find_groups(padded, whole_blocks(lens, block_size), 2)
    assert len(groups) > 1
    made = share({"block_tables": padded, "context_lens": lens}, groups, block_size, 16)
    assert np.array_equal(padded[3, : len(tables[3])], tables[3]), "share changed the tables of the step"
    assert sorted(made["members"]) == list(range(16)) and len(made["group_starts"]) == ROOM + 1
    for c in range(ROOM):
        blocks = made["prefix_lens"][c] // block_size
        for row in made["members"][made["group_starts"][c] : made["group_starts"][c + 1]]:
            if row < 12:
                own = made["block_tables"][row, : len(tables[row]) - blocks]
                assert [*made["prefix_tables"][c, :blocks], *own] == tables[row]
                assert made["context_lens"][row] == lens[row] - blocks * block_size > 0


# ---- the engine ------------------------------------------------------------------------------------------------------


class WatchedSharedRunner(WatchedRunner, SharedPrefixRunner):
    """A runner with groups that looks at what it is asked to write, and that fails where a workload says so."""


def crowded_workload(seed, model):
    """A workload most of whose prompts begin with one of three texts, of which two begin alike; pools of any size."""
    rng, workload = random.Random(f"crowd {seed}"), draw_workload(seed, model)
    vocabulary, room = model.config.vocab_size, model.config.max_seq_len
    text = [rng.randrange(vocabulary) for _ in range(60)]
    branch, length = rng.randint(1, 20), rng.randint(8, 30)
    beginnings = text[:length], text[:branch] + text[30 : 30 + length], text[40 : 40 + length]
    for number, ask in enumerate(workload.asks):
        ask.prompt = [*(rng.choice(beginnings) if rng.random() < 0.85 else []), *ask.prompt[-rng.randint(1, 6) :]]
        ask.step = rng.randint(1, 15) if number else 0
        ask.abort = ask.abort and ask.step + rng.randint(0, 30)
    block_size = rng.choice((1, 2, 3, 4, 8))
    least = -(-(max(min(len(ask.prompt) + ask.params.max_new_tokens, room) for ask in workload.asks) - 1) // block_size)
    blocks = rng.choice((least, least + rng.randint(0, least), 4 * least, 8 * least))
    workload.hopeless = [[], [vocabulary], [0] * room]
    settings = {"num_blocks": blocks, "block_size": block_size, "max_batch": 8, "prefix_caching": True}
    workload.settings |= settings | {"token_budget": rng.choice((8, 24, 256))}
    return workload


def played(seed):
    """Play a workload with every group that there is, and count the steps with groups, too."""
    runners = []

    def watched(model, runner, **settings):
        runners.append(WatchedSharedRunner(model, runner.num_blocks, runner.block_size, runner.fails_at))
        runners[0].min_saved = 1
        return Engine(model, runner=runners[0], **settings)

    counts = play(crowded_workload(seed, tiny_model()), tiny_model(), watched)
    return counts + Counter(shared_steps=runners[0].shared_steps, saved_tokens=runners[0].saved_tokens)


@pytest.mark.parametrize("ten", thorough_but(range(100), 0))
def test_random_workloads_are_the_same_with_shared_prefixes(ten):
    """Pools as small as one request, chunks, aborts, failures, shared beginnings: every token is plain decoding's."""
    for seed in range(10 * ten, 10 * ten + 10):
        played(seed)


@pytest.mark.slow
def test_random_workloads_cover_what_they_are_for():
    counts = sum((played(seed) for seed in range(10, 30)), Counter())
    for name in ("shared_steps", "preemptions", "cached_tokens", "abort", "error", "stop"):
        assert counts[name] > 0, name
    assert counts["steps"] // 8 < counts["shared_steps"] < counts["steps"]


PROMPTS = [[*range(2, 22), 30 + n] for n in range(3)] + [[*range(40, 52), n] for n in range(2)] + [[9]]


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "torch"},
        {"attention": "torch", "cuda_graphs": True},
        pytest.param({"attention": "triton", "cuda_graphs": True}, marks=pytest.mark.thorough),
        pytest.param({"attention": "triton", "fused": True, "cuda_graphs": True}, marks=pytest.mark.slow),
        pytest.param({"attention": "triton", "fused": True}, marks=pytest.mark.thorough),
    ],
    ids=lambda options: "-".join(name if value is True else value for name, value in options.items()),
)
def test_every_way_to_run_a_step_gives_the_plain_engines_tokens(options):
    """Two groups and a request of its own, joined to a cache that the first request has filled."""
    model, own = wide_model().to(runtime.DEVICE), SamplingParams(max_new_tokens=5, ignore_eos=True)
    runner = SharedPrefixRunner(model, 80, 4, min_saved=1, **options)
    plain, engine = Engine(model, num_blocks=80, block_size=4), Engine(model, runner=runner)
    for prompts in (PROMPTS[::4], PROMPTS):
        assert engine.generate(prompts, own) == plain.generate(prompts, own)
    assert runner.shared_steps == 5  # the first too: of each prompt one token is not in the cache
    assert runner.saved_tokens == 5 * (2 * 20 + 1 * 12)
    if runner.graphs is not None:
        assert runner.shared_graphs.recorded == [(8, 1, 16)]  # six requests, padded to eight


def test_a_step_that_saves_too_little_is_run_as_ever():
    model, own = tiny_model(), SamplingParams(max_new_tokens=3, ignore_eos=True)
    runner = SharedPrefixRunner(model, 80, 4)
    Engine(model, runner=runner).generate(PROMPTS[:1], own)
    Engine(model, runner=runner).generate(PROMPTS, own)
    assert runner.shared_steps == runner.saved_tokens == 0


def test_graphs_for_groups_are_recorded_ahead():
    runner = SharedPrefixRunner(tiny_model(), 80, 4, cuda_graphs=True)
    runner.warm_up(4, 96)
    assert runner.shared_graphs.recorded == [(2, 1, 16), (2, 1, 32), (4, 1, 16), (4, 1, 32)]
    assert {(1, 1, 16), (4, 1, 32)} <= set(runner.graphs.recorded)


# ---- compiled --------------------------------------------------------------------------------------------------------

#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compiled(capability, dtype, head_dim, group):
    """The kernel as its launch specialises it for contiguous queries and lab 5's cache."""
    tile = tuning.extend(head_dim, NAMES[dtype], group, divmod(capability, 10))
    constants = {
        "GROUP": group, "PADDED": tuning.power_of_two(group), "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim, "BLOCK_D": tuning.block_d(head_dim),
    }  # fmt: skip
    signature = {
        "q_ptr": f"*{dtype}", "k_cache_ptr": f"*{dtype}", "v_cache_ptr": f"*{dtype}", "prefix_tables_ptr": "*i32",
        "prefix_lens_ptr": "*i32", "group_starts_ptr": "*i32", "members_ptr": "*i32", "o_ptr": "*fp32",
        "lse_ptr": "*fp32", "stride_q": ("i32:16", "i32:16", 1), "stride_k": ("i32:16",) * 3 + (1,),
        "stride_v": ("i32:16",) * 3 + (1,), "stride_ts": "i32", "stride_o": ("i32:16",) * 3 + (1,), "J": "i32",
        "parts": "i32", "scale_log2": "fp32",
    }  # fmt: skip
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    return Request(shared_prefix_kernel, signature, constants, capability, tile.warps, tile.stages, aligned)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_the_kernel_fits_each_architecture_and_spills_nothing(capability, few, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", False)
    sizes = [*itertools.product(NAMES, (64, 128), (2,)), ("bf16", 128, 8), ("bf16", 128, 5), ("bf16", 64, 1)]
    requests = [compiled(capability, *size) for size in ([("bf16", 128, 8)] if few else sizes)]
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes == 0, f"{case} spills {used.stack_bytes} bytes a thread"
