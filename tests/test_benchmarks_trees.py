"""What is counted of draft trees: the script runs, and its record holds what a tree's formulas say."""

import pytest

from benchmarks import benchmark_cli, draft_trees
from solutions.lab6_frontiers.draft_tree import expected_tokens, grow
from utils import records
from utils.serving import MODELS, SamplingParams, load_model


@pytest.fixture(scope="module")
def results():
    return records.load("draft_trees").results


@pytest.mark.slow
def test_a_quick_run_has_every_result_and_a_table():
    ways = {"greedy": SamplingParams(8, ignore_eos=True)}
    found = draft_trees.measure(nodes=(4,), chains=(2,), prompts=2, ways=ways)
    assert benchmark_cli.problems("draft_trees", found) == []
    (tree,), (chain,) = found["trees"]["greedy"], found["chains"]["greedy"]
    assert 1 <= tree["tokens_per_pass"] <= 1 + tree["depth"] and 1 <= chain["tokens_per_pass"] <= 3
    assert "tree of 4" in draft_trees.table(found)


def test_beginnings_come_from_different_texts_and_those_held_out_are_others():
    training, held_out = (draft_trees.prompts_of(name, 6) for name in ("training", "held_out"))
    assert {len(prompt) for prompt in training + held_out} == {draft_trees.PROMPT}
    assert len({tuple(prompt) for prompt in training + held_out}) == 12


def test_in_the_record_trees_are_those_that_grow_of_its_acceptances(results):
    for way, shares in results["acceptance"].items():
        for row in shares:
            assert row == sorted(row, reverse=True) and sum(row) <= 1
        for counted in results["trees"][way]:
            tree = grow(shares, counted["nodes"])
            assert (len(tree), tree.depth) == (counted["nodes"], counted["depth"])
            assert counted["expected"] == pytest.approx(expected_tokens(tree, shares))


def test_in_the_record_larger_trees_and_longer_chains_yield_more(results):
    for way in results["trees"]:
        expected = [counted["expected"] for counted in results["trees"][way]]
        assert expected == sorted(expected)
        for kind in ("trees", "chains"):
            first, last = results[kind][way][0], results[kind][way][-1]
            assert last["tokens_per_pass"] - first["tokens_per_pass"] > 2 * (first["error"] + last["error"])


def test_in_the_record_the_head_is_smaller_than_the_draft_model(results):
    assert results["draft_parameters"] == load_model(MODELS / "draft").config.parameters > results["head_parameters"]
