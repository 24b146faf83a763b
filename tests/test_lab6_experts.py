"""A layer of experts is the sum over each token's chosen experts, in one process and with experts spread over ranks."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from slow_machine_launch import launch, once

from solutions.lab6_frontiers.mixture_of_experts import MixtureOfExperts, MoEConfig
from solutions.lab6_frontiers.router import Router
from utils import runtime
from utils.distributed import DistributedError, record_collectives
from utils.transformer_math import all_to_all_bytes

CONFIG = MoEConfig(hidden=24, inner=20, experts=12, chosen=3, shared=16, scores="sigmoid", balance="bias")


def layer(config=CONFIG, seed=0, group=None, device=None):
    torch.manual_seed(seed)
    return MixtureOfExperts(config, group).to(device or runtime.DEVICE)


def tokens(count, hidden=24, seed=1, device=None):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, hidden, generator=source).to(device or runtime.DEVICE)


def by_a_loop(moe, x):
    """The same, expert by expert and token by token."""
    routed, out = moe.router(x), []
    for token, experts, weights in zip(x, routed.experts, routed.weights):
        total = torch.zeros_like(token)
        for expert, weight in zip(experts, weights):
            gate, up = (token @ moe.up[expert]).chunk(2)
            total = total + weight * ((torch.nn.functional.silu(gate) * up) @ moe.down[expert])
        if moe.shared_up is not None:
            gate, up = moe.shared_up(token).chunk(2)
            total = total + moe.shared_down(torch.nn.functional.silu(gate) * up)
        out.append(total)
    return torch.stack(out)


def with_gradients(function, moe, x):
    x = x.detach().requires_grad_()
    out = function(x)
    return [out, *torch.autograd.grad(out.square().sum(), (x, *moe.parameters()))]


def assert_equal(found, right):
    for got, of in zip(found, right, strict=True):
        assert float((got - of).detach().abs().max()) <= 2e-6 * max(1.0, float(of.detach().abs().max()))


@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(scores, shared):
    moe = layer(MoEConfig(24, 20, 6, 2, shared, scores, "none"))
    x = tokens(17)
    assert_equal(with_gradients(moe, moe, x), with_gradients(lambda x: by_a_loop(moe, x), moe, x))


def test_leading_axes_stay_and_no_tokens_are_no_problem():
    moe = layer()
    x = tokens(10)
    assert_equal([moe(x.view(2, 5, 24))], [moe(x).view(2, 5, 24)])
    assert moe(x[:0]).shape == (0, 24)
    assert int(moe.routed.counts.sum()) == 0


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_weights_sum_to_one_and_every_token_is_counted(scores):
    router = Router(24, 8, 3, scores).to(runtime.DEVICE)
    routed = router(tokens(50))
    torch.testing.assert_close(routed.weights.sum(-1), torch.ones(50, device=runtime.DEVICE))
    assert int(routed.counts.sum()) == 150
    assert all(len(set(row)) == 3 for row in routed.experts.tolist())


def test_the_auxiliary_loss_is_one_for_equal_experts_and_the_number_of_experts_for_a_single_one():
    router = Router(24, 4, 1).to(runtime.DEVICE)
    with torch.no_grad():
        router.gate.weight.zero_()
    x = tokens(64)
    assert router(x).loss.item() == pytest.approx(1)  # all scores are 1/4, whoever is chosen
    with torch.no_grad():
        router.gate.weight[2] = 100 * x[0]
    assert router(x[:1]).loss.item() == pytest.approx(4)


@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_balancing_evens_out_the_counts(balance):
    torch.manual_seed(0)
    router = Router(16, 8, 2, balance=balance).to(runtime.DEVICE)
    x = tokens(512, 16) + tokens(1, 16, seed=5)  # what tokens share makes a few experts everyone's favourites
    before = router(x).counts
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)  # at 1.0 it swings, on each CPU differently
    for _ in range(200):
        routed = router(x)
        if balance == "bias":
            router.update_bias(routed.counts, 0.005)
        else:
            optimizer.zero_grad()
            routed.loss.backward()
            optimizer.step()
    after = router(x).counts
    assert int(before.max()) > 480  # of 512 tokens
    assert int(after.max()) < 150  # 128 would be even


def test_a_bias_changes_the_choice_and_not_the_weights():
    router = Router(24, 6, 6, "sigmoid", "bias").to(runtime.DEVICE)
    x = tokens(9)
    before = router(x)
    router.update_bias(torch.tensor([9, 0, 0, 0, 0, 0], device=runtime.DEVICE), 100.0)
    after = router(x)
    assert (after.experts[:, -1] == 0).all() and not (before.experts[:, -1] == 0).all()
    order = [routed.experts.argsort(-1) for routed in (before, after)]
    torch.testing.assert_close(after.weights.gather(1, order[1]), before.weights.gather(1, order[0]))


@pytest.mark.parametrize("shared", [0, 16])
def test_a_layer_has_as_many_parameters_as_its_sizes_say(shared):
    moe = layer(MoEConfig(24, 20, 6, 2, shared))
    assert sum(parameter.numel() for parameter in moe.parameters()) == moe.config.parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [({"chosen": 0}, "between 1 and the number of experts 12, got 0"), ({"chosen": 13}, "got 13"),
     ({"scores": "tanh"}, "one of softmax, sigmoid"), ({"balance": "luck"}, "one of loss, bias, none")],
)  # fmt: skip
def test_what_a_router_cannot_do_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        MixtureOfExperts(MoEConfig(**{**vars(CONFIG), **change}))


# ---- on ranks


def shares(ranks):
    """Tokens of each rank: uneven, none on the last."""
    return [5 + 6 * rank for rank in range(ranks - 1)] + [0]


def part_of(whole, group):
    """The layer of this rank: its experts, and what all ranks have."""
    moe = layer(whole.config, group=group, device="cpu")
    mine = slice(group.rank() * moe.local, (group.rank() + 1) * moe.local)
    state = copy.copy(whole.state_dict())
    state |= {name: state[name][mine] for name in ("up", "down")}
    moe.load_state_dict(state)
    return moe


def on_a_rank(bias):
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = layer(device="cpu")
    whole.router.bias += torch.tensor(bias)
    moe = part_of(whole, group)
    x = tokens(sum(shares(group.size())), device="cpu").split(shares(group.size()))[rank]
    with record_collectives() as ledger:
        out, dx, *gradients = with_gradients(moe, moe, x)
    names = [name for name, _ in moe.named_parameters()]
    return out.detach(), dx, dict(zip(names, gradients)), ledger.bytes("all_to_all"), moe.routed.counts


@once
def spread(world_size):
    """For two routers (as drawn; all tokens to the first experts): what all ranks gave."""
    return launch(lambda: [on_a_rank([0.0] * 12), on_a_rank([9.0] * 3 + [0.0] * 9)], world_size=world_size)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["as drawn", "all to the first experts"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_experts_on_ranks_compute_what_one_process_does(ranks, which):
    found = [each[which] for each in spread(ranks)]
    whole = layer(device="cpu")
    whole.router.bias += torch.tensor([[0.0] * 12, [9.0] * 3 + [0.0] * 9][which])
    out, dx, *gradients = with_gradients(whole, whole, tokens(sum(shares(ranks)), device="cpu"))
    assert_equal([torch.cat([each[0] for each in found]), torch.cat([each[1] for each in found])], [out, dx])
    for (name, _), right in zip(whole.named_parameters(), gradients):
        each = [gradients[name] for _, _, gradients, _, _ in found]
        assert_equal([torch.cat(each) if name in ("up", "down") else sum(each)], [right])


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_ranks_hand_over_is_four_all_to_alls_of_their_rows_and_one_of_counts(ranks):
    results = spread(ranks)
    for which in (0, 1):
        counts = torch.stack([each[which][4] for each in results]).view(ranks, ranks, -1).sum(-1)  # from, to
        for rank, each in enumerate(results):
            rows = 2 * int(counts[rank].sum()) + 2 * int(counts[:, rank].sum())  # there and back, forward and backward
            assert each[which][3] == rows * 24 * 4 + 12 * 8


def with_even_counts(tokens_each):
    """Bytes that a rank sends in a forward pass, and in a training step; each token names its three experts."""
    moe = part_of(layer(device="cpu"), dist.group.WORLD)
    with torch.no_grad():
        moe.router.gate.weight.copy_(torch.eye(12, 24))
    x = torch.zeros(tokens_each, 24)
    for token in range(tokens_each):
        x[token, [(3 * token + n) % 12 for n in range(3)]] = 1
    with record_collectives() as forward, torch.no_grad():
        moe(x)
    with record_collectives() as training:
        moe(x.requires_grad_()).sum().backward()
    return [ledger.sent_bytes("all_to_all") for ledger in (forward, training)]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_formula_of_a_layers_bytes_is_what_ranks_send_where_counts_are_even(ranks):
    formula = [all_to_all_bytes(CONFIG, 8, ranks, 4, training) for training in (False, True)]
    assert launch(with_even_counts, 8, world_size=ranks) == [formula] * ranks


def biases_after_updates():
    moe = part_of(layer(device="cpu"), dist.group.WORLD)
    for seed in range(3):
        moe(tokens(7, seed=10 * seed + dist.get_rank(), device="cpu"))
        moe.update_bias(0.01)
    return moe.router.bias


@pytest.mark.interpreted
@pytest.mark.slow
def test_all_ranks_have_the_bias_that_one_process_gets_from_the_tokens_of_all():
    whole = layer(device="cpu")
    for seed in range(3):
        whole(torch.cat([tokens(7, seed=10 * seed + rank, device="cpu") for rank in range(2)]))
        whole.update_bias(0.01)
    assert whole.router.bias.any()
    for bias in launch(biases_after_updates, world_size=2):
        torch.testing.assert_close(bias, whole.router.bias, rtol=0, atol=0)


def dies_in_the_layer():
    moe = part_of(layer(device="cpu"), dist.group.WORLD)
    if dist.get_rank() == 1:
        moe._experts = lambda rows, counts: os.kill(os.getpid(), signal.SIGKILL)
    moe(tokens(6, device="cpu"))


@pytest.mark.slow
def test_a_rank_that_dies_in_the_layer_is_named():
    with pytest.raises(DistributedError, match="rank 1 of 3 was killed by SIGKILL"):
        launch(dies_in_the_layer, world_size=3)


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(DistributedError, match="5 ranks must divide the 12 experts"):
        launch(lambda: MixtureOfExperts(CONFIG, dist.group.WORLD), world_size=5)
