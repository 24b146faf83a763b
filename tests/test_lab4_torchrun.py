"""Lab 4's training script under torchrun: two nodes are two agents on this machine, with two ranks each."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from solutions.lab4_zero.__main__ import METHODS, main

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ("-m", "solutions.lab4_zero", "--steps", "2", "--rows", "8")


def started(*arguments: str) -> subprocess.Popen:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)


def losses(*agents: subprocess.Popen) -> list[str]:
    """The losses that the first rank of all prints."""
    said = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(said)
    (told,) = (found for text in said if (found := re.findall(r"^step \d: loss ([\d.]+)$", text, re.MULTILINE)))
    return told


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def one_process() -> list[str]:
    return losses(started("--standalone", "--nproc-per-node", "1", *SCRIPT))


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_two_nodes_of_two_ranks_print_the_losses_of_one_process(one_process, method):
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1")
    line = ("--nnodes", "2", "--nproc-per-node", "2", *meeting, *SCRIPT, "--method", method)
    assert losses(started(*line), started(*line)) == one_process and len(one_process) == 2


def test_without_torchrun_it_says_how_it_is_started(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "torchrun --nproc-per-node 2 -m solutions.lab4_zero" in capsys.readouterr().err
