"""The benchmark of the backward kernel's steps: what it calls wrong, which steps it leaves out, and what it records."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import hopper_backward
from benchmarks.attention_errors import plain_attention
from benchmarks.benchmark_cli import problems

SIZES = (1, 2, 1, 9, 14)


def plain(q, k, v, do, dlse, causal):
    """Gradients in float32, rounded at the end."""
    found = plain_attention(*(x.float() for x in (q, k, v, do)), dlse, causal)[2:]
    return [x.to(q.dtype) for x in found]


@pytest.fixture
def kernels(monkeypatch):
    """Plain PyTorch in the place of the kernels: one is right, one is off in one element, one has a NaN there."""

    def off(value: float):
        def backward(q, k, v, o, lse, do, dlse, causal, scale):
            found = plain(q, k, v, do, dlse, causal)
            found[1].view(-1)[5] = value
            return found

        return backward

    monkeypatch.setattr(hopper_backward, "forward", lambda q, k, v, causal: (None, None))
    right = {"right": lambda q, k, v, o, lse, do, dlse, causal, scale: plain(q, k, v, do, dlse, causal)}
    monkeypatch.setattr(hopper_backward, "backwards", lambda: right | {"off": off(9.0), "nan": off(float("nan"))})


@pytest.mark.parametrize("causal", [False, True])
def test_a_right_backward_pass_is_called_right(kernels, causal):
    assert hopper_backward.wrong("right", SIZES, 64, torch.bfloat16, causal) == []


def test_one_wrong_element_is_found_and_the_gradient_named(kernels):
    (problem,) = hopper_backward.wrong("off", SIZES, 64, torch.bfloat16, True)
    assert problem.startswith("dk is off by ")
    assert hopper_backward.wrong("nan", SIZES, 64, torch.bfloat16, True) == ["dk: 1 elements are NaN or infinite"]


def test_a_step_that_is_wrong_or_waits_for_ever_is_not_timed(monkeypatch, capsys):
    def run(command, *, timeout, **_):
        name = command[command.index("--only-check") + 1]
        if name == "waits":
            raise subprocess.TimeoutExpired(command, timeout)
        said = {"right": "", "wrong": "wrong, bf16: dq is off by 1\n", "crashes": ""}[name]
        return subprocess.CompletedProcess(command, int(name != "right"), said, "CUDA error" * (name == "crashes"))

    monkeypatch.setattr(hopper_backward.subprocess, "run", run)
    right, unavailable = hopper_backward.those_right(["right", "wrong", "waits", "crashes"])
    assert right == {"right": hopper_backward.CASES} and list(unavailable) == ["wrong", "waits", "crashes"]
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["right: right", "wrong, bf16: dq is off by 1"]
    assert said[2].startswith("waits was not done after 400 s") and said[3] == "crashes: CUDA error"


def test_runs_that_differ_from_the_first_are_counted(monkeypatch):
    monkeypatch.setattr(hopper_backward, "forward", lambda q, k, v, causal: (None, None))
    monkeypatch.setattr(hopper_backward, "REPEATED_SHAPES", [(1, 1, 4, 16, False), (1, 1, 4, 16, True)])
    monkeypatch.setattr(hopper_backward, "REPEATED_RUNS", 5)
    calls = []

    def sometimes(q, *_):
        calls.append(q)
        return q + (len(calls) in (3, 4)), q, q

    monkeypatch.setattr(hopper_backward, "backwards", lambda: {"same": lambda q, k, *_: (q, k), "other": sometimes})
    found = hopper_backward.repeated(["same", "other"])
    assert found == {"same": {"runs": 10, "equal": 10}, "other": {"runs": 10, "equal": 8}}


@pytest.mark.slow
def test_each_shape_has_times_and_ratios_of_all_that_are_right(kernels, known_times, monkeypatch, capsys):
    monkeypatch.setattr(hopper_backward.hopper_implementations, "need_hopper", lambda: None)
    names = ["start", "right"]
    monkeypatch.setattr(hopper_backward, "backwards", lambda: dict.fromkeys([*names, "off"], plain_backward))
    monkeypatch.setattr(hopper_backward, "checked", lambda name: "dk is off by 1" if name == "off" else "")
    monkeypatch.setattr(hopper_backward.attention_speed, "baseline", lambda backend: forward_only)
    monkeypatch.setattr(hopper_backward, "repeated", lambda names: {"right": {"runs": 9, "equal": 0}})
    monkeypatch.setattr(hopper_backward, "kernels", lambda call: call() and {"longest": 1e-3, "all": 1.5e-3})
    by_token = lambda *qkv, causal: forward_only(*(x.transpose(1, 2) for x in qkv), causal).transpose(1, 2)  # noqa: E731
    monkeypatch.setattr(hopper_backward.hopper_peers, "installed", lambda: ({"fa4": by_token}, {"fa3": "broken"}))
    monkeypatch.setattr(hopper_backward.hopper_peers, "check", lambda *_: 12)
    module = SimpleNamespace(flash_attn_func=by_token)
    monkeypatch.setattr(hopper_backward, "importlib", SimpleNamespace(import_module=lambda name: module))
    results = hopper_backward.measure(shapes=[(1, 2, 64, 64, True)], rounds=2, lap_seconds=0.0)
    assert problems("hopper_backward", results) == []
    assert results["cases"] == {"start": 80, "right": 80, "fa4": 12}
    assert results["unavailable"] == {"off": "dk is off by 1", "fa3": "broken"}
    (item,) = results["points"]
    assert list(item["timed"]) == [*names, "cudnn", "fa4"] and item["kernels"].keys() == item["timed"].keys()
    assert {base: set(over) for base, over in item["over"].items()} == {
        base: set(item["timed"]) - {base} for base in ("start", "cudnn", "fa4")
    }
    text = hopper_backward.table(results)
    assert "right: 0 of 9 runs equal" in text
    assert "D 64, N 64, causal" in text and "1000 of 1500" in text and text.endswith("fa3: broken")


def plain_backward(q, k, v, o, lse, do, dlse, causal, scale):
    return plain(q, k, v, do, torch.zeros(q.shape[:3]), causal)


def forward_only(q, k, v, causal):
    """Attention in float32, as autograd can go through it."""
    scores = q.float() @ k.float().mT / q.shape[3] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & causal
    return (torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.float()).to(q.dtype)
