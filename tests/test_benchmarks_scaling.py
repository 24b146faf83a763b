"""The family of small models without a GPU: two tiny settings, a stacked model against the same model alone."""

import json
import math

import pytest
import torch

from benchmarks import scaling_runs
from benchmarks.benchmark_cli import problems
from benchmarks.scaling_runs import (
    Ensemble,
    Text,
    best,
    books,
    model_config,
    new_model,
    schedule,
    settings,
    size,
    train,
)

SEED = 20320
CPU = torch.device("cpu")


def text(characters=12, length=4_000):
    """Characters that mostly follow from the one before, so that there is something to learn."""
    random = torch.Generator().manual_seed(SEED)
    draws = torch.randint(characters, (length,), generator=random).tolist()
    line = [0]
    for k in range(1, length):
        line.append(draws[k] if k % 7 == 0 else (5 * line[-1] + 3) % characters)
    numbers = torch.tensor(line)
    return Text(numbers[: length - 600], numbers[length - 600 :], characters)


def test_the_books_are_characters_without_a_gap_and_chapters_are_held_out():
    found = books()
    assert len(found.training) > 9_000_000 and 200_000 < len(found.held_out) < 300_000
    assert found.training.unique().tolist() == list(range(found.characters))
    assert int(found.held_out.max()) < found.characters < 100


@pytest.mark.parametrize("rates", [(1e-2, 3e-2), (2e-2, 2e-2)])
def test_stacked_models_take_the_steps_that_each_takes_alone(rates):
    config, windows = model_config(16, 1, text(), 8), torch.randint(12, (2, 3, 9), generator=torch.Generator())
    together = Ensemble(config, [0, 1], CPU, torch.float64)
    together.steps_on(iter([windows] * 3), iter([torch.tensor(rates, dtype=torch.float64)] * 3))
    for m, rate in enumerate(rates):
        model = new_model(config, seed=m, dtype=torch.float64)
        groups = [[p for p in model.parameters() if (p.ndim == 2) == wide] for wide in (True, False)]
        options = {"lr": rate, "betas": scaling_runs.BETAS}
        adam = [
            torch.optim.AdamW(group, weight_decay=decay, **options)
            for group, decay in zip(groups, (scaling_runs.WEIGHT_DECAY, 0.0), strict=True)
        ]
        for _ in range(3):
            model.zero_grad()
            model(windows[m, :, :-1], windows[m, :, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), scaling_runs.LARGEST_NORM)
            for each in adam:
                each.step()
        alone = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(together.weights[m], alone, rtol=1e-6, atol=1e-7)


def test_the_learning_rate_rises_and_ends_near_a_tenth():
    shares = list(schedule(200))
    assert shares[0] == pytest.approx(0.1) and max(shares) > 0.99 and shares.index(max(shares)) in (9, 10)
    assert 0.1 < shares[-1] < 0.11
    assert list(schedule(1)) == [1.0]


def test_settings_spend_their_budget_and_stay_within_the_limits():
    found = [(budget, *each) for budget in scaling_runs.BUDGETS for each in settings(books(), budget)]
    assert len({budget for budget, *_ in found}) == len(scaling_runs.BUDGETS)
    for budget, config, tokens in found:
        assert 6 * size(config) * tokens == pytest.approx(budget, rel=1e-4)
        assert tokens <= scaling_runs.MOST_EPOCHS * len(books().training)
    for budget in scaling_runs.BUDGETS:
        assert sum(each[0] == budget for each in found) >= 3, "an IsoFLOP parabola needs three sizes"


@pytest.mark.slow
def test_two_settings_fill_the_schema_and_an_interrupted_measurement_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling_runs, "TOKENS_PER_PARAMETER", (0.01, 300))
    calls, progress = [], tmp_path / "runs.jsonl"
    real = scaling_runs.train_setting
    sizes = {"shapes": ((16, 1), (32, 1)), "budgets": (3e7,), "text": text(), "context": 8, "rows": 2}

    def interrupted(config, *rest):
        calls.append(config.hidden)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(config, *rest)

    monkeypatch.setattr(scaling_runs, "train_setting", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scaling_runs.measure(**sizes, progress=progress)
    assert len(progress.read_text().splitlines()) == 1
    kept = json.loads(progress.read_text())["setting"]
    results = scaling_runs.measure(**sizes, progress=progress)
    assert calls == [16, 32, 32] and not progress.exists()
    assert problems("scaling_runs", results) == []
    assert results["settings"][0] == kept
    assert len(scaling_runs.table(results).splitlines()) == 2
    for setting in results["settings"]:
        rate, losses = best(setting)
        assert len(losses) == 2 and rate in {run["rate"] for run in setting["runs"]}
        assert min(losses) < math.log(12)  # better than guessing


@pytest.mark.slow
def test_longer_training_learns_more_and_equal_seeds_give_equal_losses():
    config = model_config(16, 1, text(), 8)
    short, long = (train(config, n, [1e-2, 1e-2], [3, 3], text(), rows=2, device=CPU) for n in (320, 3_200))
    assert short[0] == short[1] and float(long[0]) < float(short[0]) - 0.2


def test_what_cannot_be_trained_is_refused_by_name():
    config = model_config(16, 1, text(), 8)
    with pytest.raises(ValueError, match="got 1 rates and 2 seeds"):
        train(config, 100, [1e-2], [0, 1], text())
    with pytest.raises(ValueError, match="a step has 64 tokens, got only 60"):
        train(config, 60, [1e-2], [0], text())
