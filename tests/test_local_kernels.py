"""Kernels that tests start cannot take each other's ports, and a silent one is started again."""

from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from nbval import kernel

from utils import local_kernels


def test_each_kernel_has_a_folder_of_its_own_instead_of_ports():
    one, other = KernelManager(), KernelManager()
    assert one.transport == other.transport == "ipc"
    assert Path(one.ip).parent.is_dir()
    assert Path(one.ip).parent != Path(other.ip).parent


def test_a_transport_that_a_test_asks_for_is_left_alone():
    assert KernelManager(transport="tcp").transport == "tcp"


def test_a_kernel_that_does_not_answer_is_started_again(monkeypatch, capsys):
    silent = iter([RuntimeError("Kernel didn't respond in 60 seconds"), None])

    def start_kernel(self, **kwargs):
        if error := next(silent):
            raise error
        raise KeyboardInterrupt  # far enough: the second attempt was made

    monkeypatch.setattr(KernelManager, "start_kernel", start_kernel)
    with pytest.raises(KeyboardInterrupt):
        kernel.start_new_kernel(kernel_name="python3")
    assert "trying again" in capsys.readouterr().out


def test_a_kernel_that_never_answers_is_an_error_after_a_few_attempts(monkeypatch):
    attempts = []

    def start_kernel(self, **kwargs):
        attempts.append(self)
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(KernelManager, "start_kernel", start_kernel)
    with pytest.raises(RuntimeError, match="Kernel died"):
        kernel.start_new_kernel(kernel_name="python3")
    assert len(attempts) == local_kernels.ATTEMPTS
