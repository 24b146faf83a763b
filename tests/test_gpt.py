"""The common test model: tied, frozen and unused parameters, the same weights and data everywhere, and it learns."""

import pytest
import torch

from utils.gpt import GPT, GPT_1_4B, TINY, Block, GPTConfig, batch, loss_of


def gradients_of(model, seed=3, size=2):
    model(*batch(model.config, size, seed)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_the_embedding_and_the_head_are_one_parameter():
    model = GPT(TINY)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    loose = GPT(TINY.replace(tied=False))
    assert loose.head.weight is not loose.embedding.weight


def test_a_tied_weight_gets_the_sum_of_both_gradients():
    tied, loose = GPT(TINY), GPT(TINY.replace(tied=False))
    loose.load_state_dict(tied.state_dict())  # the head's entry is the embedding
    both, apart = gradients_of(tied), gradients_of(loose)
    torch.testing.assert_close(both["embedding.weight"], apart["embedding.weight"] + apart["head.weight"])


def test_frozen_positions_get_no_gradient_and_trained_ones_do():
    assert gradients_of(GPT(TINY))["positions"] is None
    assert gradients_of(GPT(TINY.replace(frozen_positions=False)))["positions"].abs().max() > 0


def test_an_unused_parameter_gets_no_gradient_and_all_others_do():
    gradients = gradients_of(GPT(TINY.replace(unused_parameter=True)))
    assert {name for name, gradient in gradients.items() if gradient is None} == {"positions", "unused"}


def test_the_tiny_model_divides_evenly_among_no_two_three_or_four_ranks():
    block = sum(p.numel() for p in GPT(TINY).blocks[0].parameters())
    for unused in (False, True):
        model = GPT(TINY.replace(unused_parameter=unused))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained % 3 and trained % 4 and block % 3 and block % 4
    for size in (TINY.layers, TINY.heads, TINY.hidden, TINY.feed_forward, TINY.vocabulary, TINY.context):
        assert size % 2 and size % 3, size


def test_the_large_preset_has_1417_million_parameters():
    assert sum(p.numel() for p in GPT(GPT_1_4B, device="meta").parameters()) == 1_416_744_960


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    one, same, other = (GPT(TINY, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_data_follow_from_the_seed_and_leave_the_callers_random_state_alone():
    before = torch.get_rng_state()
    assert batch(TINY, 2, 5)[0].equal(batch(TINY, 2, 5)[0]) and not batch(TINY, 2, 5)[0].equal(batch(TINY, 2, 6)[0])
    assert torch.equal(before, torch.get_rng_state())


def test_a_token_is_never_predicted_from_later_ones():
    model = GPT(TINY)
    tokens, _ = batch(TINY, 2)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TINY.vocabulary
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(tokens)[:, 7], model(changed)[:, 7])


def test_the_parts_called_one_by_one_give_the_loss():
    model = GPT(TINY)
    tokens, targets = batch(TINY, 3)
    x = model.embed(tokens)
    for block in model.blocks:
        assert isinstance(block, Block)
        x = block(x)
    assert torch.equal(loss_of(model.logits(x), targets), model(tokens, targets))


def test_the_loss_of_bfloat16_logits_is_computed_in_float32_and_of_float64_in_float64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert GPT(TINY, dtype=dtype)(*batch(TINY, 2)).dtype == expected


def test_checkpointed_blocks_give_the_same_gradients_bit_by_bit():
    plain, again = (gradients_of(GPT(TINY.replace(checkpointing=flag))) for flag in (False, True))
    assert all(plain[name].equal(again[name]) for name in plain if plain[name] is not None)


def test_checkpointed_blocks_run_twice_in_training_and_once_without_gradients():
    model, calls = GPT(TINY.replace(checkpointing=True)), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(*batch(TINY, 1)).backward()
    assert len(calls) == 2
    with torch.no_grad():
        model(*batch(TINY, 1))
    assert len(calls) == 3


@pytest.mark.slow
def test_it_learns_the_rule_of_its_data():
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(50):
        loss = model(*batch(TINY, 8, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 4 and losses[-1] < 2


def test_targets_are_the_tokens_moved_on_by_one():
    tokens, targets = batch(TINY, 4, seed=1)
    assert tokens.shape == targets.shape == (4, TINY.context) and tokens.dtype == torch.int64
    assert tokens[:, 1:].equal(targets[:, :-1])
    assert tokens.min() >= 0 and targets.max() < TINY.vocabulary


def test_a_smaller_batch_is_the_beginning_of_a_larger_one():
    assert batch(TINY, 12, seed=9)[0][:5].equal(batch(TINY, 5, seed=9)[0])


def test_most_tokens_follow_the_rule():
    tokens, targets = batch(TINY.replace(context=400), 8)
    share = ((5 * tokens + 7) % TINY.vocabulary == targets).float().mean()
    assert 0.9 < share < 0.97


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 4}, "heads must divide hidden, got hidden 35 and heads 4"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        TINY.replace(**changes)
    with pytest.raises(TypeError, match="hidden must be an integer"):
        GPTConfig(hidden=35.0)


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="the context is 13 tokens, got a sequence of 14"):
        GPT(TINY)(torch.zeros(1, 14, dtype=torch.int64))
