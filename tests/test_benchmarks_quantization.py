"""What is measured of models in few bits: the scripts run, and the records hold what formulas and the library say."""

import math

import pytest
import torch

from benchmarks import benchmark_cli, fp8_training, weight_bits
from utils import records, runtime
from utils.quantization import bits_per_weight
from utils.serving import MODELS, load_model, load_tokenizer


@pytest.fixture(scope="module")
def ways():
    found = records.load("weight_bits").results["ways"]
    return {(way["method"], way["bits"], way["group"]): way for way in found}


def test_results_of_arithmetic_are_recorded_without_a_gpu_and_name_the_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    monkeypatch.setattr(records, "DIRECTORY", tmp_path)
    results = records.parse(
        (MODELS.parents[1] / "records" / "fp8_training.json").read_text(), "fp8_training", "fp8_training.json"
    ).results
    run = (lambda quick: results, fp8_training.table, fp8_training.SCHEMA, [])
    assert benchmark_cli.run("fp8_training", *run) == 1 and not list(tmp_path.iterdir())
    assert benchmark_cli.run("fp8_training", *run, needs_gpu=False) == 0
    assert records.load("fp8_training").device == records.CPU
    assert f"fp8_training on {records.CPU}" in capsys.readouterr().out


def test_calibration_text_is_spread_over_the_excerpt_and_held_out_text_is_another():
    tokenizer = load_tokenizer(MODELS / "target")
    calibration, held_out = weight_bits.texts(tokenizer, 4)
    assert calibration.shape == (4, weight_bits.WINDOW) and held_out.ndim == 1
    first, last = (tokenizer.decode(calibration[k].tolist()) for k in (0, -1))
    assert "Emma Woodhouse" in first and "LORD" not in first and "Emma" not in last


def test_bits_in_the_record_are_those_of_the_formula(ways):
    model = load_model(MODELS / "target", dtype="float32")
    for (_, bits, group), way in ways.items():
        assert way["bits_per_weight"] == bits_per_weight(model, bits, None if group == "row" else int(group))
    assert ways["RTN", 4, "128"]["bits_per_weight"] == 4 + 16 / 128


def test_in_the_record_smaller_groups_and_gptq_lose_less(ways):
    for bits in (4, 3, 2):
        row, wide, narrow = (ways["RTN", bits, group]["change"] for group in ("row", "128", "32"))
        assert row > wide > narrow
        for group in ("128", "32"):
            assert ways["GPTQ", bits, group]["change"] < ways["RTN", bits, group]["change"]
    assert all(abs(way["change"]) < 0.001 for (_, bits, _), way in ways.items() if bits == 8)


def test_ours_and_the_librarys_rounding_cost_the_same_but_for_the_size_of_the_steps(ways):
    results = records.load("weight_bits_peer").results
    assert math.isclose(results["loss"], results["peer_loss"], rel_tol=1e-5)
    for way in results["ways"]:
        assert math.isclose(way["change"], ways[way["method"], way["bits"], "128"]["change"], rel_tol=0.02)
        steps = (2 ** way["bits"] - 2) / (2 ** way["bits"] - 1)  # its integers over ours, of which there is one less
        ours, theirs = way["change"] * steps**2, way["peer_change"]
        assert abs(ours - theirs) < 0.15 * theirs + 2 * way["peer_error"], way


def test_with_scales_fp8_ends_where_bf16_does_and_without_them_every_gradient_is_lost():
    runs = records.load("fp8_training").results["runs"]
    ends = {way: [run["held_out"] for run in runs if run["way"] == way] for way in fp8_training.WAYS}
    spread = max(ends["bf16"]) - min(ends["bf16"])
    for way in ("fp8, current scaling", "fp8, delayed scaling"):
        assert abs(sum(ends[way]) - sum(ends["bf16"])) / 3 < spread
    assert min(ends["fp8, no scales"]) > max(ends["bf16"])
    assert {run["zeroed"] for run in runs if run["way"] == "fp8, no scales"} == {1.0}


@pytest.mark.slow
def test_rounding_the_model_quickly_has_the_records_schema():
    results = weight_bits.measure(quick=True)
    assert benchmark_cli.problems("weight_bits", results) == []
    assert "GPTQ 3 bits" in weight_bits.table(results)
    assert all(0.01 < way["change"] < 0.3 for way in results["ways"])


@pytest.mark.slow
def test_training_a_little_has_the_records_schema_and_the_same_start():
    results = fp8_training.measure(steps=20, seeds=(0,), ways=("bf16", "fp8, current scaling", "fp8, no scales"))
    assert benchmark_cli.problems("fp8_training", results) == []
    assert "fp8, no scales, seed 0" in fp8_training.table(results)
    exact, scaled, unscaled = (run["losses"][0] for run in results["runs"])
    assert math.isclose(exact, scaled, rel_tol=0.01) and unscaled > scaled


@pytest.mark.slow
def test_weights_that_are_stored_in_e4m3_are_numbers_of_it():
    model, _ = fp8_training.train("weights in e4m3, to nearest", 0, 2)
    before = [parameter.clone() for parameter in model.parameters()]
    fp8_training.store(model, None)
    for old, new in zip(before, model.parameters()):
        torch.testing.assert_close(old, new, rtol=1e-6, atol=0)
