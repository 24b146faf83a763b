"""The draft head: its files, its training, and what the one that comes with the course is worth."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from utils.serving import MODELS, CheckpointError, Decoder, ModelConfig, attend_causally, load_model
from utils.serving.heads import DraftHead, load_head, save_head
from utils.serving.training import heads
from utils.serving.training.heads import (
    Plan,
    evaluate,
    hidden_states,
    least_squares,
    new_head,
    spread,
    step_loss,
    train,
)

TINY = ModelConfig("qwen3", 61, 32, 48, 2, 4, 2, 8, 64, qk_norm=True, tied_head=True, eos_token_ids=(1,))
SMALL = Plan(windows=12, context=48, steps=60, runs=4, length=16, compared=32, depth=2, lr=1e-2, intermediate_size=24)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    model = Decoder(TINY).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def windows():
    """Text in which a token mostly says what the next one is."""
    generator = torch.Generator().manual_seed(1)
    follows, tokens = torch.randperm(61, generator=generator), [5]
    for chance in torch.rand(24 * 48 - 1, generator=generator).tolist():
        tokens.append(int(follows[tokens[-1]]) if chance < 0.9 else int(chance * 1000) % 61)
    return torch.tensor(tokens).view(24, 48)


# ---- the module ------------------------------------------------------------------------------------------------------


def test_a_step_is_the_formula_of_its_text(target):
    head = DraftHead(32, 24)
    state, tokens = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)), torch.arange(12).view(3, 4)
    found, scores = head.step(state, tokens, target)
    embedded = target.embed_tokens.weight[tokens]
    x = torch.cat((state, embedded / (embedded.square().mean(-1, keepdim=True) + 1e-6).sqrt()), -1)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    opened = F.silu(y @ head.gate_proj.weight.T) * (y @ head.up_proj.weight.T)
    right = x @ head.join.weight.T + head.join.bias + opened @ head.down_proj.weight.T
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(scores, right @ target.embed_tokens.weight.T)
    assert sum(weight.numel() for weight in head.parameters()) == 2 * 32 * (32 + 2 * 24) + 24 * 32 + 4 * 32


def test_a_saved_head_is_loaded_in_the_targets_dtype(target, tmp_path):
    head = DraftHead(32, 24)
    save_head(head, tmp_path, torch.float32)
    found = load_head(tmp_path, target)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), found.parameters(), strict=True))
    assert not any(weight.requires_grad for weight in found.parameters()) and not found.training
    save_head(head, tmp_path)
    assert load_head(tmp_path, target).join.weight.dtype == torch.float32


def test_what_is_no_head_for_the_target_is_refused(target, tmp_path):
    with pytest.raises(CheckpointError, match="holds no draft head"):
        load_head(tmp_path, target)
    save_head(DraftHead(16, 24), tmp_path)
    with pytest.raises(CheckpointError, match="made for a hidden size of 16, the target has 32"):
        load_head(tmp_path, target)
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "intermediate_size": 24}')
    with pytest.raises(CheckpointError, match="size mismatch"):
        load_head(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="holds no draft head"):
        load_head(tmp_path, target)


# ---- training --------------------------------------------------------------------------------------------------------


def test_least_squares_leave_an_error_that_no_input_explains(target, windows):
    head, states = new_head(target, SMALL), hidden_states(target, windows)
    least_squares(head, target, windows, states)
    x = torch.cat(
        (states[:, 8:-1].float(), head.token_norm(F.embedding(windows[:, 9:], target.embed_tokens.weight))), -1
    )
    error = states[:, 9:].float() - head.join(x)
    correlation = (x.flatten(0, 1).T @ error.flatten(0, 1)) / (
        x.flatten(0, 1).norm(dim=0)[:, None] * error.flatten(0, 1).norm(dim=0)
    )
    assert correlation.abs().max() < 0.02 and error.mean(dim=(0, 1)).abs().max() < 0.02


def test_training_lowers_what_it_says_and_is_the_same_each_time(target, windows):
    states, weights, losses = hidden_states(target, windows[:12]), [], []
    row, place = torch.arange(12)[:, None], torch.arange(8, 45)[None]
    for steps in (60, 60, 1):
        head = new_head(target, SMALL)
        train(head, target, windows[:12], states, Plan(**asdict(SMALL) | {"steps": steps}))
        weights.append(head.state_dict())
        losses.append(step_loss(head, target, windows, states, row, place, torch.arange(12 * 37), 2).item())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert losses[0] == losses[1] < losses[2] - 0.05, losses


def test_an_evaluation_is_teacher_forced_and_compares_with_the_target(target, windows):
    """A head that knows the target's states is the target: it agrees with it everywhere."""

    class Oracle:
        hidden_size = 32

        def step(self, state, tokens, model):
            right = hidden_states(target, windows[:1])[0].float()
            place = (state[:, None] - right[None]).abs().sum(-1).argmin(1) + 1
            assert torch.equal(windows[0, place], tokens)
            return right[place], model.logits(right[place])

    for row in evaluate(Oracle(), target, windows[:1], 3):
        assert row["agreement"] == 1 and row["acceptance"] == pytest.approx(1, abs=1e-4)
        assert row["loss"] == pytest.approx(row["target_loss"], abs=1e-4)
        assert row["accuracy"] == row["target_accuracy"]


def test_the_states_that_are_learnt_are_the_targets_last_ones(target, windows):
    found = hidden_states(target, windows[:3])
    positions = torch.arange(48).expand(3, -1)
    torch.testing.assert_close(
        found.float(), target.hidden(windows[:3], positions, attend_causally), rtol=1e-3, atol=1e-3
    )


def test_windows_are_spread_over_the_text():
    found = spread(torch.arange(100), 3, 10)
    assert found[:, 0].tolist() == [0, 40, 90] and len(spread(torch.arange(25), 9, 10)) == 2
    with pytest.raises(ValueError, match="a window has 30 tokens, the text has 25"):
        spread(torch.arange(25), 9, 30)


@pytest.mark.parametrize(("change", "message"), [({"steps": 0}, "steps must be over 0"), ({"context": 139}, "no room")])
def test_a_plan_that_cannot_be_followed_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Plan(**change)


@pytest.mark.slow
def test_the_command_trains_and_writes_what_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(heads, "HELD_OUT", 1)
    monkeypatch.setattr(heads, "read_books", lambda: ["It is a truth universally acknowledged. " * 60] * 3)
    sizes = {"windows": 2, "steps": 2, "context": 128, "length": 16, "runs": 2, "compared": 8}
    heads.main(["--out", str(tmp_path), *(f"--{name}={value}" for name, value in sizes.items())])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["training_tokens"] == 256 and metrics["plan"]["steps"] == 2
    assert load_head(tmp_path, load_model(MODELS / "target")).join.weight.dtype == torch.bfloat16
    assert "hidden states are there" in capsys.readouterr().out


# ---- the one that comes with the course ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_head_that_comes_with_the_course_is_small_and_drafts_as_its_record_says():
    folder, model = MODELS / "heads", load_model(MODELS / "target", dtype="float32")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3e6
    metrics, head = json.loads((folder / "metrics.json").read_text()), load_head(folder, model)
    assert metrics["parameters"] == sum(weight.numel() for weight in head.parameters())
    assert metrics["plan"] == asdict(Plan())
    recorded = metrics["depths"]
    _, held_out = heads.texts(Plan(windows=1))
    found = evaluate(head, model, held_out[::8])
    for row, expected in zip(found, recorded, strict=True):
        for name in ("accuracy", "agreement", "acceptance"):
            assert row[name] == pytest.approx(expected[name], abs=0.05), name
        assert row["loss"] > row["target_loss"] and row["accuracy"] < row["target_accuracy"]
    acceptances = [row["acceptance"] for row in recorded]
    assert acceptances[0] == max(acceptances) > 0.4
