"""The leaderboard without a GPU: entries in plain PyTorch, right and wrong, and known times."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
from attention_entries import plain
from fake_stopwatch import FakeStopwatch

from benchmarks import attention_entry, attention_leaderboard, attention_speed, blocked_stream, hopper_implementations
from benchmarks.attention_board import YOURS
from benchmarks.attention_entry import EntryError
from utils import records, runtime, timing

# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape"),
    [("64x2048", (8, 32, 2048, 64, False)), ("256x16384:causal", (1, 8, 16384, 256, True))],
)
def test_a_shape_has_the_same_tokens_and_hidden_size_as_lab_3s(text, shape):
    assert attention_leaderboard.shape_of(text) == shape


@pytest.mark.parametrize("text", ["64", "64x", "x64", "64x2048:all", "48x2048", "64x2047", "8x2048", "64x0", "-64x2"])
def test_another_shape_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="got "):
        attention_leaderboard.shape_of(text)


@pytest.mark.parametrize("name", ["", " ", "a" * 41, "two\nlines", "cudnn", "capstone", "yours"])
def test_another_name_is_refused(name):
    with pytest.raises(argparse.ArgumentTypeError):
        attention_leaderboard.name_of(name)


def test_a_name_is_the_files_or_modules_unless_it_is_given():
    assert attention_leaderboard.arguments_of(["kernels/mine.py"]).name == "mine"
    assert attention_leaderboard.arguments_of(["solutions.capstone_hopper"]).name == "capstone_hopper"
    assert attention_leaderboard.arguments_of(["mine.py", "--name", " the third "]).name == "the third"
    with pytest.raises(SystemExit):
        attention_leaderboard.arguments_of(["kernels/cudnn.py"])


def test_without_a_gpu_nothing_is_measured_and_that_is_said(entry_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    board = tmp_path / "board.json"
    assert attention_leaderboard.main([str(entry_file()), "--board", str(board)]) == 1
    assert "needs a CUDA GPU and none is in use" in capsys.readouterr().err and not board.exists()
    assert attention_leaderboard.main(["--board", str(board)]) == 0
    assert "nothing is recorded in" in capsys.readouterr().out


# ---- from an entry to a row ------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, small_cases):
    """A machine that says it has a GPU, with known times and everybody's attention in plain PyTorch."""

    names = (
        hopper_implementations.OURS,
        hopper_implementations.FAST,
        hopper_implementations.LAB,
        *hopper_implementations.BASELINES,
    )
    monkeypatch.setattr(hopper_implementations, "functions", lambda: dict.fromkeys(names, plain))
    monkeypatch.setattr(hopper_implementations, "compile_first", lambda *arguments: None)
    monkeypatch.setattr(attention_speed, "ours", plain)
    monkeypatch.setattr(attention_speed, "TOKENS", 32)
    monkeypatch.setattr(attention_speed, "HIDDEN", 32)
    for name, value in {"WARM_SECONDS": 0, "LAP_SECONDS": 0, "ROUNDS": 1}.items():
        monkeypatch.setattr(attention_leaderboard, name, value)
    monkeypatch.setattr(blocked_stream, "stopwatch", FakeStopwatch)
    monkeypatch.setattr(
        attention_leaderboard, "runtime", SimpleNamespace(HAS_GPU=True, gpu_name=lambda: "NVIDIA H100 80GB HBM3")
    )
    monkeypatch.setattr(records, "versions", lambda: {"torch": "2.11.0", "triton": "3.6.0"})
    return ["--shapes", "16x16", "16x16:causal"]


def test_a_right_entry_gets_a_row_and_the_board_is_sorted(entry_file, tmp_path, machine, capsys):
    board = tmp_path / "board.json"
    assert attention_leaderboard.main([str(entry_file()), "--board", str(board), *machine]) == 0
    out = capsys.readouterr().out
    assert "right in 6 ragged cases" in out and f"recorded in {board}" in out
    assert "NVIDIA H100 80GB HBM3, bf16, forward and backward, 2 shapes" in out
    assert all(name in out for name in ("mine", "capstone, fast", "lab 3", "flash", "cudnn"))
    (row,) = json.loads(board.read_text())["rows"]
    assert row["name"] == "mine" and row["base"] == "cudnn" and len(row["sha256"]) == 64
    assert row["versions"] == {"torch": "2.11.0", "triton": "3.6.0"} and row["device"] == "NVIDIA H100 80GB HBM3"
    assert [(p["direction"], p["causal"]) for p in row["points"]] == [
        (direction, causal) for causal in (False, True) for direction in ("forward", "backward")
    ]
    assert set(row["points"][0]["timed"]) == {"yours", "capstone", "lab 3", "flash", "cudnn"}
    assert set(row["points"][1]["timed"]) == {"yours", "capstone", "capstone, fast", "lab 3", "flash", "cudnn"}


@pytest.mark.slow
def test_a_forward_pass_alone_has_a_table_of_its_own(entry_file, tmp_path, machine, capsys):
    board = str(tmp_path / "board.json")
    path = entry_file("o.to(q.dtype)", "o.to(q.dtype).detach()", name="mine.py")
    assert attention_leaderboard.main([str(path), "--board", board, *machine]) == 1
    assert "no gradient (--forward-only" in capsys.readouterr().err
    assert attention_leaderboard.main([str(path), "--board", board, "--forward-only", *machine]) == 0
    assert attention_leaderboard.main([str(entry_file(name="whole.py")), "--board", board, *machine]) == 0
    capsys.readouterr()
    assert attention_leaderboard.main(["--board", board]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert "bf16, forward, 2 shapes" in first and " mine" in first and "whole" not in first
    assert "bf16, forward and backward, 2 shapes" in second and "whole" in second


def test_a_wrong_entry_gets_no_row(entry_file, tmp_path, machine, capsys):
    board = tmp_path / "board.json"
    path = entry_file("tril(Nk - Nq)", "tril()")
    assert attention_leaderboard.main([str(path), "--board", str(board), *machine]) == 1
    assert "no row: B=2 Hq=4 Hkv=2 Nq=9 Nk=13 D=16 bfloat16 causal=True" in capsys.readouterr().err
    assert not board.exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("o.to(q.dtype)", "(o * (0.9 if q.shape[2] == 16 else 1)).to(q.dtype)", "D 16, N 16, full: o is 10.0% away"),
        (
            "o = torch",
            "assert q.shape[2] != 16, 'too\\nlarge'\n    o = torch",
            "ends with AssertionError: large",
        ),
    ],
)
def test_an_entry_that_fails_on_the_shapes_that_are_timed_gets_no_row(
    entry_file, tmp_path, machine, capsys, old, new, said
):
    board = tmp_path / "board.json"
    assert attention_leaderboard.main([str(entry_file(old, new)), "--board", str(board), *machine]) == 1
    assert said in capsys.readouterr().err and not board.exists()


def test_ratios_are_times_as_fast_as_cudnn_and_as_fa2_where_there_is_none(monkeypatch):
    seconds = {YOURS: 2e-3, "flash": 4e-3, "cudnn": 1e-3}

    def compare(calls, **options):
        return {name: timing.summarize([seconds[name]] * 3) for name in calls}

    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(blocked_stream, "stopwatch", FakeStopwatch)
    monkeypatch.setattr(attention_leaderboard, "LAP_SECONDS", 0)
    entry = attention_entry.Entry("mine", print, None, "0" * 64)
    for names, base, ratio in (((YOURS, "flash", "cudnn"), "cudnn", 0.5), ((YOURS, "flash"), "flash", 2)):
        calls = {("forward", name): lambda: None for name in names}
        point = attention_leaderboard.point((1, 1, 16, 16, False), "forward", calls)
        row = attention_leaderboard.row_of(entry, "mine", "bf16", [point], "a GPU", {"torch": "2"})
        assert row["base"] == base and row["points"][0]["over"][YOURS]["ratio"] == pytest.approx(ratio)
    lonely = attention_leaderboard.point((1, 1, 16, 16, False), "forward", {("forward", YOURS): print})
    with pytest.raises(EntryError, match="neither cuDNN nor FA2"):
        attention_leaderboard.row_of(entry, "mine", "bf16", [lonely], "a GPU", {"torch": "2"})
