"""The ladder's benchmark without a GPU: plain steps, known times, the schema of its record, what happens on failure."""

import subprocess
import threading
import types

import pytest
import torch

from benchmarks import attention_step_checks, attention_steps
from benchmarks.benchmark_cli import problems
from solutions.capstone_hopper import steps
from solutions.capstone_hopper.steps import compiler

GOOD = ("textbook", "descriptors")
SIZES = ((1, 2, 128),)
#: Checks are processes elsewhere; here they are threads, and the interpreter is one.
ONE_AT_A_TIME = threading.Lock()


def kernels():
    return [{"head_dim": 64, "causal": False, "registers": 128, "spilled_bytes": 0, "shared_bytes": 73728}]


def checked(name: str) -> dict:
    """Two steps are right, the others say why not."""
    if name == attention_steps.TRACES:
        return {"checks": [], "kernels": []}
    if name not in GOOD:
        return {"failed": "no Hopper GPU here"}
    with ONE_AT_A_TIME:
        return {"checks": [attention_step_checks.check(steps.step(name), 64, True, SIZES)], "kernels": kernels()}


def a_trace(shape, names, rounds, lap_seconds):
    cycles = {event: [0, 5] for event in ("keys_there", "asked", "scores_issued", "scores_there", "softmax_done")}
    consumer = {**cycles, "output_issued": [9, 9], "output_there": [20, 30]}
    events = {"consumer 0": consumer, "consumer 1": consumer, "producer": {"keys_issued": [0, 1]}}
    shape = dict(zip(("batch", "heads", "seq_len", "head_dim", "causal"), shape))
    return [{"name": "overlap", **shape, "program": 3, "cost": 1.01, "events": events}]


def measured(monkeypatch, check):
    monkeypatch.setattr(attention_steps, "traces", a_trace)
    return attention_steps.measure(
        shapes=[(1, 2, 128, 64, True)], rounds=3, lap_seconds=0, seconds=0, check=check
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_that_fails_is_named_and_stops_no_other_but_nothing_is_recorded(known_times, monkeypatch):
    results = measured(monkeypatch, checked)
    assert [each["name"] for each in results["steps"]] == list(GOOD)
    assert set(results["failed"]) == {each.name for each in steps.EVERYONE} - set(GOOD)
    assert set(GOOD) <= set(results["points"][0]["timed"])
    assert problems("attention_steps", results) == ["results.failed is not in the schema"]
    assert "FAILED ping-pong: no Hopper GPU here" in attention_steps.table(results)


@pytest.mark.slow
def test_without_a_failure_the_results_fill_their_layout(known_times, monkeypatch):
    monkeypatch.setattr(steps, "EVERYONE", tuple(steps.step(name) for name in GOOD))
    results = measured(monkeypatch, checked)
    assert problems("attention_steps", results) == []
    assert results["checks"][0]["largest_error"] <= results["checks"][0]["allowed"]
    text = attention_steps.table(results)
    assert "D64 N128 causal" in text and "textbook: D64 full 128 registers, 0 B spilled, 72 KiB" in text
    assert "trace of overlap: x 1.010 with clock reads, products" in text


def test_rates_are_compared_with_cudnn(monkeypatch, known_times):
    calls = {"textbook": lambda: None, "cudnn": lambda: None}
    point = attention_steps.point((1, 2, 128, 64, False), calls, rounds=3, lap_seconds=0)
    assert set(point["over_cudnn"]) == {"textbook", "cudnn"}
    assert point["over_cudnn"]["cudnn"]["ratio"] == 1
    assert point["flops"] == 4 * 2 * 128**2 * 64


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: o is off"), "Traceback\nValueError: o is off"),
        (subprocess.CompletedProcess([], -9, "", ""), "exit status -9"),
        (subprocess.TimeoutExpired([], 1), "not done within 1 s"),
    ],
)
def test_the_process_of_a_check_may_fail_or_hang(monkeypatch, run, said):
    def fake(*arguments, **options):
        if isinstance(run, Exception):
            raise run
        return run

    monkeypatch.setattr(subprocess, "run", fake)
    assert said in attention_steps.verdict("textbook", 1)["failed"]


def test_a_check_reports_what_its_process_printed(monkeypatch):
    done = subprocess.CompletedProcess([], 0, 'a warning\n{"checks": [], "kernels": []}\n', "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    assert attention_steps.verdicts(["exp2"]) == {"exp2": {"checks": [], "kernels": []}}


def test_a_wrong_step_is_refused_with_its_error():
    class Wrong:
        name = "wrong"

        def forward(self, q, k, v, causal):
            return torch.zeros_like(q), torch.zeros(q.shape[:3])

    with pytest.raises(ValueError, match=r"wrong, torch.bfloat16, \(1, 2, 128, 64\), causal False: o is off by"):
        attention_step_checks.check(Wrong(), 64, False, SIZES)


def test_a_step_reports_its_checks_and_what_its_kernels_spend(monkeypatch):
    made = types.SimpleNamespace(asm={"ptx": "text"}, metadata=types.SimpleNamespace(shared=1024))
    kernel = steps.STEPS[0].load().attention_kernel
    monkeypatch.setattr(attention_step_checks, "SIZES", SIZES * 2)
    monkeypatch.setattr(attention_step_checks.check, "__defaults__", (SIZES, torch.bfloat16))
    monkeypatch.setattr(compiler, "assemble", lambda ptx: {"registers": 99, "spilled_bytes": 4, "text": ptx})
    run = kernel.run

    def watched(each, seen):
        monkeypatch.setattr(kernel, "run", lambda *a, **o: seen.append(made) or run(*a, **o), raising=False)

    monkeypatch.setattr(attention_step_checks, "watched", watched)
    found = attention_step_checks.report("textbook")
    assert [(item["head_dim"], item["causal"]) for item in found["checks"]] == [
        (64, False), (64, True), (128, False), (128, True),
    ]  # fmt: skip
    assert found["kernels"][0] == {
        "head_dim": 64, "causal": False, "registers": 99, "spilled_bytes": 4, "shared_bytes": 1024,
    }  # fmt: skip


def test_what_a_launch_compiled_is_kept(monkeypatch):
    class Kernel:
        def run(self, *arguments, **options):
            return "compiled", arguments, options

    class Module:
        attention_kernel = Kernel()

    class Step:
        def load(self):
            return Module

    seen = []
    attention_step_checks.watched(Step(), seen)
    assert Module.attention_kernel.run(1, grid=2) == ("compiled", (1,), {"grid": 2}) == seen[0]


def test_a_trace_is_taken_of_each_step_and_its_clock_reads_are_paid_for(monkeypatch, known_times):
    times = torch.zeros(3, 7, 1, dtype=torch.int64)
    launched = []

    def launch(name, q, k, v, causal, given=None):
        launched.append(given)
        return q, None, times, 0

    monkeypatch.setattr(attention_steps.trace, "record", lambda name, *rest: {"name": name})
    monkeypatch.setattr(attention_steps.trace, "launch", launch)
    found = attention_steps.traces((1, 1, 128, 64, False), ["textbook"], rounds=3, lap_seconds=0)
    assert [item["name"] for item in found] == ["textbook"] and found[0]["cost"] > 0
    assert launched[0] is None and all(given is times for given in launched[1:])
