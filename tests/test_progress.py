"""Progress of long work: told to JupyterLab alone. The extension that shows it is one script."""

import json
import sys
from types import SimpleNamespace

import pytest

from utils import jupyterlab, progress


def sent(monkeypatch: pytest.MonkeyPatch, session: bool) -> list[dict]:
    """What a loop over three items tells, in a kernel that JupyterLab started or another one."""
    told: list[dict] = []
    channel = SimpleNamespace(send=told.append, close=lambda: told.append({"closed": True}))
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "comm", SimpleNamespace(create_comm=lambda target_name: channel))
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session:
        monkeypatch.setenv("JPY_SESSION_NAME", "notebooks/01_gpu_model.ipynb")
    assert list(progress.steps("abc", "case")) == ["a", "b", "c"]
    return told


def test_each_step_is_told_to_jupyterlab(monkeypatch):
    steps = [{"what": "case", "done": done, "total": 3} for done in (1, 2, 3)]
    assert sent(monkeypatch, session=True) == [*steps, {"closed": True}]


def test_nbval_and_a_terminal_are_told_nothing(monkeypatch):
    assert sent(monkeypatch, session=False) == []


def test_a_loop_that_is_left_early_closes_its_channel(monkeypatch):
    told: list[str] = []
    channel = SimpleNamespace(send=lambda _: None, close=lambda: told.append("closed"))
    monkeypatch.setattr(progress, "_comm", lambda: channel)
    with pytest.raises(RuntimeError):
        for _ in progress.steps("abc", "case"):
            raise RuntimeError
    assert told == ["closed"]


def test_the_extension_replaces_an_older_one_and_names_every_lecture_and_lab(tmp_path):
    folder = jupyterlab.install(tmp_path)
    (folder / "static" / "remoteEntry.old.js").write_text("old", encoding="utf-8")
    assert jupyterlab.install(tmp_path) == folder
    [script] = (folder / "static").iterdir()
    about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    assert about["jupyterlab"]["_build"]["load"] == f"static/{script.name}"
    named = jupyterlab.named_notebooks()
    assert {"notebook 00", "notebook 14", "lab 1", "lab 7"} <= set(named)
    assert all((jupyterlab.ROOT / path).is_file() for path in named.values())
    assert "https://" not in script.read_text(encoding="utf-8").replace("https://github.com", "")
