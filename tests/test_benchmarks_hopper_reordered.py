"""The comparison of the reordered backward kernel: what it calls wrong, and which steps it leaves out."""

from __future__ import annotations

import subprocess

import pytest
import torch

from benchmarks import hopper_reordered
from benchmarks.attention_errors import plain_attention

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

    monkeypatch.setattr(hopper_reordered, "forward", lambda q, k, v, causal: (None, None))
    right = {"right": lambda q, k, v, o, lse, do, dlse, causal, scale: plain(q, k, v, do, dlse, causal)}
    monkeypatch.setattr(hopper_reordered, "backwards", lambda: right | {"off": off(9.0), "nan": off(float("nan"))})


@pytest.mark.parametrize("causal", [False, True])
def test_a_right_backward_pass_is_called_right(kernels, causal):
    assert hopper_reordered.wrong("right", SIZES, 64, torch.bfloat16, causal) == []


def test_one_wrong_element_is_found_and_the_gradient_named(kernels):
    (problem,) = hopper_reordered.wrong("off", SIZES, 64, torch.bfloat16, True)
    assert problem.startswith("dk is off by ")
    assert hopper_reordered.wrong("nan", SIZES, 64, torch.bfloat16, True) == ["dk: 1 elements are NaN or infinite"]


def test_a_step_that_is_wrong_or_waits_for_ever_is_not_timed(monkeypatch, capsys):
    def run(command, *, timeout, **_):
        name = command[command.index("--only-check") + 1]
        if name == "waits":
            raise subprocess.TimeoutExpired(command, timeout)
        said = {"right": "", "wrong": "wrong, bf16: dq is off by 1\n", "crashes": ""}[name]
        return subprocess.CompletedProcess(command, int(name != "right"), said, "CUDA error" * (name == "crashes"))

    monkeypatch.setattr(hopper_reordered.subprocess, "run", run)
    assert hopper_reordered.those_right(["right", "wrong", "waits", "crashes"], ["bf16"], 5.0) == ["right"]
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["right: right", "wrong, bf16: dq is off by 1"]
    assert said[2].startswith("waits was not done after 5 s") and said[3] == "crashes: CUDA error"
