"""Attention of trees over a paged cache: kernel and PyTorch agree with float64, traffic is exact, every GPU fits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from paged_cases import LAYOUTS, assert_close, normal, paged
from parameters import few_on_hopper, thorough_but

from solutions.lab5_serving import tuning
from solutions.lab5_serving.paged_extend import paged_attention_extend
from solutions.lab6_frontiers import tree_torch
from solutions.lab6_frontiers.draft_tree import MOST_NODES, Tree
from solutions.lab6_frontiers.tree_attention import paged_attention_tree, paged_tree_kernel, tile_of
from solutions.lab6_frontiers.tree_torch import visible
from utils import runtime
from utils.checks import cases
from utils.compile_only import Request, resource_usages
from utils.kernel_profile import profile_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = runtime.pick(cpu=16, gpu=64)


def drawn_tree(draw, nodes):
    return Tree((-1, *(draw.randrange(node) for node in range(1, nodes))))


class Chunks:
    """Chunks of a text each, ``known`` tokens and perhaps a tree behind them, whose root is the last of these.

    Args:
        sizes: (context before the chunk, tokens of the chunk that are text, nodes of its tree with the root or 0).
    """

    def __init__(self, sizes, seed=0, **settings):
        draw = random.Random(seed)
        self.trees = [drawn_tree(draw, nodes) if nodes else None for _, _, nodes in sizes]
        counts = [text + max(0, nodes - 1) for _, text, nodes in sizes]
        self.given = paged([before + n for (before, _, _), n in zip(sizes, counts, strict=True)], seed=seed, **settings)
        self.starts = [0]
        for count in counts:
            self.starts.append(self.starts[-1] + count)
        bits, roots = torch.randint(-(2**62), 2**62, (self.starts[-1],)), []  # no query of a text looks at its bits
        for (before, text, _), tree, start in zip(sizes, self.trees, self.starts, strict=False):
            roots.append(before + text - 1 if tree else before + text)
            if tree:
                bits[start + text - 1 : start + text - 1 + len(tree)] = torch.tensor(tree.bits)
        self.chunks = (
            tuple(torch.tensor(x, dtype=torch.int32, device=runtime.DEVICE) for x in (self.starts, roots)),
            bits.to(runtime.DEVICE),
        )

    def arguments(self, q):
        (starts, roots), bits = self.chunks
        return q, *self.given.cache[:3], starts, self.given.context_lens, roots, bits

    def right(self, q, scale=None):
        """Attention in float64, query by query, over what a node's path says."""
        out, roots, group = [], self.chunks[0][1].tolist(), q.shape[1] // self.given.k_cache.shape[2]
        for s, tree in enumerate(self.trees):
            keys, values = (
                x[s].cpu().double().repeat_interleave(group, 1) for x in (self.given.keys, self.given.values)
            )
            count = self.starts[s + 1] - self.starts[s]
            for i in range(count):
                place = len(keys) - count + i
                seen = list(range(min(place + 1, roots[s])))
                if tree and place >= roots[s]:
                    seen += [roots[s] + node for node in (0, *tree.path(place - roots[s]))]
                one = q[self.starts[s] + i].cpu().double()
                scores = torch.einsum("hd,nhd->hn", one, keys[seen]) * (scale or 1 / math.sqrt(q.shape[2]))
                out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values[seen]))
        return torch.stack(out)


def test_a_mask_shows_the_text_and_the_ancestors():
    tree = Tree((-1, 0, 0, 1, 1, 2))
    mask = visible(torch.tensor([0, *tree.bits]), 9, 3)
    assert mask[0].tolist() == [True] * 3 + [False] * 6  # the last token of the text before the root
    assert mask[1:, :3].all() and torch.equal(mask[1:, 3:], tree.mask)


@pytest.mark.parametrize("number", thorough_but(range(12), 0, 1, 2))
def test_random_trees_beside_prompts_err_no_more_than_twice_what_pytorch_does(number):
    draw = random.Random(f"trees {number}")
    sizes = []
    for _ in range(3):
        before, text = draw.choice((0, 1, TILE, draw.randint(0, 3 * TILE))), draw.choice((1, 1, 1, 5, TILE))
        sizes.append((before, text, draw.choice((0, 1, 2, 9, TILE, MOST_NODES))))
    D, G, group = draw.choice((16, 40, 64)), draw.choice((1, 2)), draw.randint(1, 4)
    settings = {"G": G, "D": D, "block_size": draw.choice((1, 4, 16)), "dtype": DTYPES[number % 3]}
    given = Chunks(sizes, number, layout=draw.choice(LAYOUTS), **settings)
    q = cases.with_layout(normal(given.starts[-1], G * group, D, dtype=DTYPES[number % 3], seed=number), "strided")
    exact, theirs = given.right(q), tree_torch.paged_attention_tree(*given.arguments(q))
    wide = [x.float() if x.is_floating_point() else x for x in given.arguments(q)]
    assert_close(tree_torch.paged_attention_tree(*wide), exact)
    assert_close(paged_attention_tree(*given.arguments(q)), exact, theirs)


def test_without_a_tree_it_is_the_extend_kernel_bit_for_bit():
    given = Chunks([(7, 20, 0), (30, 1, 0), (0, 9, 0)])
    q = normal(given.starts[-1], 4, 16)
    (starts, _), _ = given.chunks
    expected = paged_attention_extend(q, *given.given.cache[:3], starts, given.given.context_lens)
    assert torch.equal(paged_attention_tree(*given.arguments(q)), expected)


def test_a_chain_is_a_causal_chunk():
    given = Chunks([(21, 1, 6)])
    given.chunks[1].copy_(torch.tensor(Tree.chain(5).bits))
    q = normal(6, 2, 16)
    (starts, _), _ = given.chunks
    expected = paged_attention_extend(q, *given.given.cache[:3], starts, given.given.context_lens)
    assert torch.equal(paged_attention_tree(*given.arguments(q)), expected)


def test_a_node_does_not_depend_on_what_it_does_not_see():
    given = Chunks([(19, 1, 12)], G=1)
    (tree,), q = given.trees, normal(12, 2, 16)
    before = paged_attention_tree(*given.arguments(q))
    table = given.given.block_tables[0]
    changed = 19 + 5
    given.given.k_cache[table[changed // 4], changed % 4] += 3.0
    given.given.v_cache[table[changed // 4], changed % 4] -= 3.0
    after = paged_attention_tree(*given.arguments(q))
    for node in range(12):
        assert torch.equal(before[node], after[node]) == (not tree.mask[node, 5]), node


def test_a_pass_reads_the_context_once_for_all_nodes_and_8_bytes_of_mask_per_row():
    """Each key head reads the keys and values up to the tile's last query, once, and the tile's masks."""
    before, nodes, G, group, D = 3 * TILE, TILE, 2, 2, 16
    given = Chunks([(before, 1, nodes)], G=G, D=D)
    q = normal(nodes, G * group, D)
    with profile_kernel(check_races=True) as profile:
        paged_attention_tree(*given.arguments(q))
    assert not profile.findings, profile.report()
    tile = tile_of(D, q.dtype, group, tuning.capability_of(runtime.DEVICE))
    queries = tile.m // group
    seen = sum(before + min(first + queries, nodes) for first in range(0, nodes, queries))
    loaded = {name: counters.bytes_loaded for name, counters in profile.by_argument.items()}
    assert loaded["k_cache_ptr"] == loaded["v_cache_ptr"] == G * seen * D * 4
    assert loaded["q_ptr"] == q.numel() * 4 and loaded["bits_ptr"] == G * nodes * group * 8
    assert profile.bytes_stored == q.numel() * 4


def test_a_tree_costs_the_bytes_of_a_chain_of_as_many_nodes_and_its_masks():
    found = []
    for kernel in (paged_attention_tree, paged_attention_extend):
        given = Chunks([(40, 1, 16), (9, 1, 5)])
        q = normal(given.starts[-1], 4, 16)
        arguments = given.arguments(q)
        with profile_kernel() as profile:
            kernel(*(arguments if kernel is paged_attention_tree else arguments[:6]))
        found.append({name: counters.bytes_loaded for name, counters in profile.by_argument.items()})
    tree, chain = found
    masks = {name: tree.pop(name) for name in ("bits_ptr", "tree_starts_ptr")}
    assert tree == chain and masks["bits_ptr"] == 2 * 2 * 8 * (16 + 5)


def test_a_scale_and_no_sequence():
    given = Chunks([(5, 1, 7)])
    q = normal(7, 4, 16)
    assert_close(paged_attention_tree(*given.arguments(q), scale=-0.3), given.right(q, -0.3))
    assert_close(tree_torch.paged_attention_tree(*given.arguments(q), scale=-0.3), given.right(q, -0.3))
    nothing = torch.zeros(0, dtype=torch.int32, device=runtime.DEVICE)
    arguments = q[:0], *given.given.cache[:2], given.given.block_tables[:0], torch.zeros_like(nothing.new_empty(1))
    assert paged_attention_tree(*arguments, nothing, nothing, nothing.long()).shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("index", "change", "error", "text"),
    [
        (0, torch.Tensor.double, TypeError, "q must be float32, float16 or bfloat16, got float64"),
        (4, lambda x: x[:2], ValueError, r"query_starts must have shape \(3,\) for 2 sequences and 7 queries"),
        (6, lambda x: x[:1], ValueError, r"tree_starts must have shape \(2,\)"),
        (6, torch.Tensor.float, TypeError, "tree_starts must be int32 or int64, got float32"),
        (7, torch.Tensor.int, TypeError, "bits must be int64, got int32"),
        (7, lambda x: x[:3], ValueError, r"bits must have shape \(7,\)"),
        (7, lambda x: x.repeat_interleave(2)[::2], ValueError, r"bits must be contiguous, got strides \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(index, change, error, text):
    given = Chunks([(3, 1, 4), (0, 3, 0)])
    arguments = list(given.arguments(normal(7, 4, 16)))
    arguments[index] = change(arguments[index])
    with pytest.raises(error, match=text):
        paged_attention_tree(*arguments)


# ---- compiled --------------------------------------------------------------------------------------------------------

#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compiled(capability, dtype, head_dim, group):
    """The kernel as its launch specialises it for large contiguous tensors."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    tile = tile_of(head_dim, dtypes[dtype], group, divmod(capability, 10))
    constants = {
        "GROUP": group, "PADDED": tuning.power_of_two(group), "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim, "BLOCK_D": tuning.block_d(head_dim), "stride_bb": 1,
    }  # fmt: skip
    signature = {
        "q_ptr": f"*{dtype}", "k_cache_ptr": f"*{dtype}", "v_cache_ptr": f"*{dtype}", "block_tables_ptr": "*i32",
        "query_starts_ptr": "*i32", "context_lens_ptr": "*i32", "tree_starts_ptr": "*i32", "bits_ptr": "*i64",
        "o_ptr": f"*{dtype}", "stride_q": ("i32:16", "i32:16", 1), "stride_k": ("i32:16",) * 3 + (1,),
        "stride_v": ("i32:16",) * 3 + (1,), "stride_bs": "i32", "stride_o": ("i32:16", "i32:16", 1), "S": "i32",
        "scale_log2": "fp32",
    }  # fmt: skip
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    return Request(paged_tree_kernel, signature, constants, capability, tile.warps, tile.stages, aligned)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_the_kernel_fits_each_architecture_and_spills_nothing(capability, few, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", False)
    sizes = (("bf16", 128, 2), ("bf16", 64, 2), ("bf16", 256, 4), ("fp32", 128, 1))
    requests = [compiled(capability, *each) for each in sizes[: 1 if few else None]]
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes == 0, f"{case} spills {used.stack_bytes} bytes a thread"
