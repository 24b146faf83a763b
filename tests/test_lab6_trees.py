"""Trees of candidates: shapes, the best tree of a size, and a rule that keeps the target's distribution."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from test_lab5_speculative import KEPT, REFUSED, VOCABULARY, chain, numbers, texts

from solutions.lab5_serving.speculative import draw, verify
from solutions.lab6_frontiers import tree_sampling
from solutions.lab6_frontiers.draft_tree import Tree, expected_accepted, expected_tokens, grow
from solutions.lab6_frontiers.tree_sampling import NONE, draw_candidates, tree_sample, verify_trees
from utils.chi_square import chi_square

LENGTH = 3
#: Three children of the root, two of the first of them, and a leaf of depth 3.
SHAPE = Tree((-1, 0, 0, 1, 1, 2, 0, 3))
STAR = Tree((-1, 0, 0, 0))
DECLINING = [[0.6, 0.2, 0.1, 0.05], [0.5, 0.2, 0.1], [0.4, 0.1]]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_a_tree_knows_depths_ranks_children_and_who_sees_whom():
    assert SHAPE.depths == (0, 1, 1, 2, 2, 2, 1, 3) and SHAPE.depth == 3
    assert SHAPE.ranks == (0, 0, 1, 0, 1, 0, 2, 0)
    assert SHAPE.children[0] == (1, 2, 6) and SHAPE.inner == (0, 1, 2, 3)
    assert SHAPE.path(7) == [1, 3, 7] and SHAPE.path(0) == []
    for node in range(len(SHAPE)):
        assert SHAPE.mask[node].nonzero()[:, 0].tolist() == [0, *SHAPE.path(node)]


def test_the_64th_node_is_the_sign_bit():
    tree = Tree.chain(63)
    assert tree.bits[63] == -1 and tree.bits[62] == 2**63 - 1 and tree.mask[63].all()


def test_some_of_the_nodes_are_a_tree_without_those_whose_parent_is_missing():
    tree, nodes = SHAPE.only([0, 2, 3, 5, 7])
    assert nodes == [0, 2, 5] and tree.parents == (-1, 0, 1)
    assert SHAPE.only(range(8)) == (SHAPE, list(range(8))) and SHAPE.only([]) == (Tree((-1,)), [0])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "1 to 64 nodes, got 0"),
        ((-1, *range(64)), "1 to 64 nodes, got 65"),
        ((0, 0), "its parent is -1, got 0"),
        ((-1, 0, 2), r"parent of node 2 stands before it, in 0\.\.1, got 2"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


# ---- the best tree of a size -----------------------------------------------------------------------------------------


def every_tree(nodes):
    """All trees of so many nodes; some of them differ in the order of their nodes alone."""
    return (Tree((-1, *parents)) for parents in itertools.product(*(range(node) for node in range(1, nodes))))


@pytest.mark.parametrize("nodes", [1, 2, 4, 6])
def test_no_tree_of_the_size_yields_more_than_the_one_that_is_grown(nodes):
    best = max(expected_tokens(tree, DECLINING) for tree in every_tree(nodes))
    assert expected_tokens(grow(DECLINING, nodes), DECLINING) == pytest.approx(best, rel=1e-12)


def test_the_beginning_of_a_grown_tree_is_the_smaller_one():
    whole = grow(DECLINING, 30)
    for nodes in range(1, len(whole)):
        assert grow(DECLINING, nodes).parents == whole.parents[:nodes]


def test_a_chain_is_expected_to_yield_what_lecture_13_says():
    a, k = 0.7, 5
    tree = grow([[a]] * k, 64)
    assert tree == Tree.chain(k)
    assert expected_tokens(tree, [[a]] * k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert expected_accepted(tree, [[a]] * k) == pytest.approx([a**d for d in range(1, k + 1)])


def test_expected_lengths_by_depth_are_those_of_played_trees():
    """Independent choices by the acceptance table, 40,000 times, against the sums of products."""
    tree = grow(DECLINING, 16)
    chosen = [torch.multinomial(torch.tensor([*row, 1 - sum(row)]), 40_000, True, generator=numbers(d))
              for d, row in enumerate(DECLINING)]  # fmt: skip
    table = torch.full((len(tree) + 1, 5), len(tree))
    for node, parent in enumerate(tree.parents[1:], 1):
        table[parent, tree.ranks[node]] = node
    at, expected = torch.zeros(40_000, dtype=torch.int64), expected_accepted(tree, DECLINING)
    for depth, ranks in enumerate(chosen):
        at = table[at, ranks]
        assert float((at < len(tree)).double().mean()) == pytest.approx(expected[depth], abs=0.01)


def test_candidates_that_are_never_accepted_are_left_out():
    assert grow([[0.5, 0.0], []], 9) == Tree((-1, 0)) and grow([], 9) == Tree((-1,))
    assert expected_accepted(Tree((-1, 0, 0, 1)), [[0.5]]) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("acceptance", "nodes", "message"),
    [
        ([[0.5]], 0, "1 to 64 nodes, got 0"),
        ([[0.5]], 65, "1 to 64 nodes, got 65"),
        ([[0.5], [0.7, 0.4]], 3, r"acceptance\[1\] must hold probabilities"),
        ([[-0.1]], 3, r"acceptance\[0\] must hold"),
    ],
)
def test_what_is_no_table_of_acceptances_is_refused(acceptance, nodes, message):
    with pytest.raises(ValueError, match=message):
        grow(acceptance, nodes)


# ---- candidates ------------------------------------------------------------------------------------------------------


def test_candidates_are_drawn_without_replacement():
    q = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    drawn = draw_candidates(q.expand(100_000, -1), torch.rand(100_000, 2, generator=numbers(1), dtype=torch.float64))
    pairs = (drawn[:, 0] * 4 + drawn[:, 1]).bincount(minlength=16).view(4, 4)
    expected = q[:, None] * q / (1 - q[:, None])
    fit = chi_square(pairs, expected.fill_diagonal_(0))
    assert fit.degrees == 5 and fit.p_value > KEPT, str(fit)


def test_where_nothing_is_left_there_is_no_candidate():
    q = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
    drawn = draw_candidates(q, torch.full((2, 3), 0.25))
    assert drawn.tolist() == [[1, NONE, NONE], [1, 2, NONE]]


# ---- plain distributions ---------------------------------------------------------------------------------------------


def filled(tree, newest, q, uniforms):
    """Candidates of S trees behind the tokens ``newest``, drawn from the draft's chain ``q`` (V, V)."""
    tokens = newest[:, None].repeat(1, len(tree))
    for node in tree.inner:
        children = list(tree.children[node])
        drawn = draw_candidates(q[tokens[:, node].clamp(min=0)], uniforms[:, children])
        tokens[:, children] = drawn.masked_fill(tokens[:, node, None] == NONE, NONE)
    return tokens


def rows(tree, tokens, p, q):
    """The target's distributions behind all nodes, and the draft's behind those that have children."""
    return p[tokens.clamp(min=0)], q[tokens[:, list(tree.inner)].clamp(min=0)]


def first_tokens(judge, samples, seed, q, tree=SHAPE):
    """The first LENGTH tokens of ``samples`` texts that start at token 0, decoded in trees, as counts (V, ..., V)."""
    p, generator = chain(1), numbers(seed)
    text = torch.zeros(samples, 1 + LENGTH * (tree.depth + 1), dtype=torch.int64)
    length, every = torch.ones(samples, dtype=torch.int64), torch.arange(samples)
    for _ in range(LENGTH):  # each round adds a token at least
        uniforms = torch.rand(2, samples, len(tree), generator=generator, dtype=torch.float64)
        tokens = filled(tree, text[every, length - 1], q, uniforms[0])
        paths, added = judge(tree, tokens, *rows(tree, tokens, p, q), uniforms[1])
        for nodes in paths.unbind(1):
            going = nodes > 0
            text[every[going], length[going]] = tokens[every[going], nodes[going]]
            length = length + going
        text[every, length] = added
        length = length + 1
    cells = (text[:, 1 : 1 + LENGTH] * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    return cells.bincount(minlength=VOCABULARY**LENGTH).view((VOCABULARY,) * LENGTH)


DRAFTS = {
    "another": chain(2),
    "the same": chain(1),
    "a point": torch.eye(VOCABULARY, dtype=torch.float64).roll(1, 1),
    "uniform": torch.full((VOCABULARY, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64),
}


def assert_keeps(draft, samples, tree=SHAPE, seed=1):
    fit = chi_square(first_tokens(verify_trees, samples, seed, DRAFTS[draft], tree), texts())
    assert fit.degrees > 90 and fit.p_value > KEPT, f"seed {seed}: {fit}"


@pytest.mark.parametrize("draft", DRAFTS)
def test_twenty_thousand_texts_have_the_targets_distribution_whatever_the_draft(draft):
    assert_keeps(draft, 20_000)


@pytest.mark.thorough
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("tree", [SHAPE, Tree.chain(2), Tree((-1, 0, 0, 0, 0, 0)), grow(DECLINING, 12)], ids=str)
def test_three_hundred_thousand_texts_have_the_targets_distribution(draft, tree):
    assert_keeps(draft, 300_000, tree, seed=2)


def test_one_tree_at_a_time_gives_what_the_batch_gives_from_the_same_random_numbers():
    uniforms = torch.rand(2, 300, len(SHAPE), generator=numbers(3), dtype=torch.float64)
    p, q = chain(1), chain(2)
    tokens = filled(SHAPE, torch.arange(300) % VOCABULARY, q, uniforms[0])
    target, draft = rows(SHAPE, tokens, p, q)
    paths, added = verify_trees(SHAPE, tokens, target, draft, uniforms[1])
    for i in range(300):
        expected = [node for node in paths[i].tolist() if node > 0], int(added[i])
        assert tree_sample(SHAPE, tokens[i], target[i], draft[i], uniforms[1, i]) == expected
    assert {int((row > 0).sum()) for row in paths} == {0, 1, 2, 3}


def test_a_chain_is_verified_as_lecture_13_does():
    k, S, p, q = 3, 2000, chain(1), chain(2)
    tree, uniforms = Tree.chain(k), torch.rand(2, S, k + 1, generator=numbers(4), dtype=torch.float64)
    tokens = filled(tree, torch.arange(S) % VOCABULARY, q, uniforms[0])
    target, draft = rows(tree, tokens, p, q)
    paths, added = verify_trees(tree, tokens, target, draft, uniforms[1])
    # There the last number draws the added token, here the root's.
    accepted, expected = verify(target, draft, tokens[:, 1:], uniforms[1].roll(-1, 1))
    assert torch.equal((paths > 0).sum(1), accepted) and torch.equal(added, expected)


def test_greedy_verification_follows_the_likeliest_token_and_adds_it_where_the_tree_lacks_it():
    S, p, q = 500, chain(1), chain(3)
    best, order = p.argmax(-1), q.argsort(-1, descending=True)
    tokens = torch.arange(S)[:, None].repeat(1, len(SHAPE)) % VOCABULARY
    for node, parent in enumerate(SHAPE.parents[1:], 1):
        tokens[:, node] = order[tokens[:, parent], SHAPE.ranks[node]]
    one_hot = torch.nn.functional.one_hot(best, VOCABULARY).double()
    paths, added = verify_trees(SHAPE, tokens, *rows(SHAPE, tokens, one_hot, q), torch.zeros(S, len(SHAPE)))
    for i in range(S):
        at, walked = 0, []
        while following := [c for c in SHAPE.children[at] if tokens[i, c] == best[tokens[i, at]]]:
            at = following[0]
            walked.append(at)
        assert [node for node in paths[i].tolist() if node > 0] == walked
        assert added[i] == best[tokens[i, at]]


def test_more_candidates_are_accepted_more_often_and_the_first_as_often_as_alone():
    S, p, q = 50_000, chain(1), chain(2)
    uniforms = torch.rand(2, S, 4, generator=numbers(5), dtype=torch.float64)
    shares = []
    for tree in (Tree((-1, 0)), Tree((-1, 0, 0)), Tree((-1, 0, 0, 0))):
        tokens = filled(tree, torch.zeros(S, dtype=torch.int64), q, uniforms[0, :, : len(tree)])
        paths, _ = verify_trees(tree, tokens, *rows(tree, tokens, p, q), uniforms[1, :, : len(tree)])
        shares.append(float((paths[:, 0] > 0).double().mean()))
    assert shares[0] == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=0.01)
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [a[0][:-1], *a[1:]], r"tokens of a tree of 8 nodes, 4 with children, must end in \(8,\)"),
        (lambda a: [a[0], a[1][:-1], *a[2:]], r"target_probs .* must end in \(8, 5\), got \(7, 5\)"),
        (lambda a: [*a[:2], a[2][:3], a[3]], r"draft_probs .* must end in \(4, 5\), got \(3, 5\)"),
        (lambda a: [*a[:3], a[3][:2]], r"uniforms .* must end in \(8,\), got \(2,\)"),
        (lambda a: [torch.full_like(a[0], 2), *a[1:]], "candidate 2 of node 1 has probability 0 in the draft"),
        (lambda a: [torch.ones_like(a[0]), *a[1:]], "candidate 1 of node 2 has .* or came before"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, message):
    p, q = torch.full((8, 5), 0.2), torch.full((4, 5), 0.25)
    p[:, 1], q[:, 2] = 0.0, 0.0
    with pytest.raises(ValueError, match=message):
        tree_sample(SHAPE, *change([torch.arange(8) % 5, p, q, torch.zeros(8)]))


# ---- wrong rules -----------------------------------------------------------------------------------------------------


#: What a line of the rule is, and what it is with a mistake in it.
MISTAKES = {
    "a refused candidate leaves the target as it was": ("residual(p, q), p)", "p, p)"),
    "the residual is of the target's own row": (
        "residual(p, q), p)", "residual(target_probs[every, node.clamp(max=7)], q), p)",
    ),
    "a refused candidate stays in the draft": ("q.scatter(-1, token.unsqueeze(-1), 0.0)", "q"),
    "the rest of the draft is not normalised": ("total.masked_fill(total == 0, 1.0)", "total.new_ones(())"),
    "every candidate that can be is accepted": ("< p[every, token]", "< 2 * p[every, token]"),
    "siblings behind an accepted one are tried": (" & (accepted == 0)", ""),
    "the row behind an accepted one is its parent's": (
        "target_probs[every, accepted].double(), p)", "target_probs[every, node.clamp(max=7)].double(), p)",
    ),
    "the added token is the target's": ("draw(p, uni", "draw(target_probs[every, last(nodes)], uni"),
}  # fmt: skip


def p_value(judge, tree=SHAPE):
    """Of a rule with a draft that differs from the target."""
    return chi_square(first_tokens(judge, 20_000, 6, DRAFTS["another"], tree), texts()).p_value


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_rule_with_a_mistake_in_it_is_refused(mistake):
    source, (right, wrong) = inspect.getsource(verify_trees), MISTAKES[mistake]
    assert source.count(right) == 1
    # A child's number is greater than its parent's.
    names = vars(tree_sampling) | {"last": lambda nodes: nodes.clamp(min=0).amax(1)}
    exec(source.replace(right, wrong), names)
    assert p_value(names["verify_trees"]) < REFUSED


def likeliest_first(tree, tokens, target, draft, uniforms):
    """Siblings are tried in the order of the target's probability."""
    children = list(tree.children[0])
    order = target[:, 0].gather(1, tokens[:, children].clamp(min=0)).argsort(1, descending=True)
    tokens = tokens.clone()
    tokens[:, children] = tokens[:, children].gather(1, order)
    return verify_trees(tree, tokens, target, draft, uniforms)


def longest_path(tree, tokens, target, draft, uniforms):
    """Each leaf's path is judged as a chain of its own, and the longest accepted beginning is taken."""
    every, best = torch.arange(len(tokens)), None
    for leaf in [node for node in range(len(tree)) if not tree.children[node]]:
        path = tree.path(leaf)
        inner = [tree.inner.index(node) for node in [0, *path[:-1]]]
        numbers = uniforms[:, [*path, 0]]
        accepted, added = verify(target[:, [0, *path]], draft[:, inner], tokens[:, path], numbers)
        nodes = torch.full((len(tokens), tree.depth), -1)
        nodes[:, : len(path)] = torch.tensor(path)
        nodes[torch.arange(tree.depth) >= accepted[:, None]] = -1
        better = accepted > (best[0] if best else torch.full_like(accepted, -1))
        new = accepted, nodes, added
        best = new if best is None else tuple(
            torch.where(better.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(new, best, strict=True)
        )  # fmt: skip
    assert len(every) == len(best[2])
    return best[1], best[2]


def same_number_for_siblings(tree, tokens, target, draft, uniforms):
    """All siblings are judged by one random number."""
    return verify_trees(tree, tokens, target, draft, uniforms[:, [0, *(tree.children[p][0] for p in tree.parents[1:])]])


@pytest.mark.parametrize(
    ("rule", "tree"),
    [(likeliest_first, STAR), (longest_path, SHAPE), (same_number_for_siblings, SHAPE)],
    ids=["likeliest first", "longest path", "same number"],
)
def test_a_wrong_rule_is_refused(rule, tree):
    assert p_value(verify_trees, tree) > KEPT and p_value(rule, tree) < REFUSED


def test_candidates_drawn_with_replacement_are_refused_by_the_rule_for_those_without():
    def independent(q, uniforms):
        return torch.stack([draw(q, number) for number in uniforms.unbind(-1)], -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "draw_candidates", independent)
        drawn = first_tokens(verify_trees, 20_000, 7, DRAFTS["another"])
    assert chi_square(drawn, texts()).p_value < REFUSED
