"""The leaderboard's file: rows are kept, damage is told, and the fastest comes first."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import attention_board, attention_leaderboard
from benchmarks.attention_board import YOURS, BoardError

# ---- the board -------------------------------------------------------------------------------------------------------


def row(name="mine", ratio=0.5, date="2026-11-21", **changes):
    time = {"seconds": 1e-3, "low": 1e-3, "high": 1e-3, "rounds": 1, "flops_per_second": 1e12}

    def point(direction, factor):
        over = {
            who: {"ratio": r, "ratio_low": r, "ratio_high": r} for who, r in ((YOURS, ratio * factor), ("flash", 0.6))
        }
        return {
            "direction": direction, "batch": 1, "heads": 1, "seq_len": 16, "head_dim": 16, "causal": True, "flops": 8,
            "calls_a_lap": 1, "timed": dict.fromkeys((YOURS, "flash", "cudnn"), time), "over": over,
        }  # fmt: skip

    return {
        "name": name, "target": "mine.py", "sha256": "ab" * 32, "date": date, "device": "an H100",
        "versions": {"torch": "2.11"}, "dtype": "bf16", "base": "cudnn",
        "points": [point("forward", 1), point("backward", 4)], **changes,
    }  # fmt: skip


def test_a_score_is_the_geometric_mean_of_ratios():
    assert attention_board.scores(row()) == pytest.approx({"forward": 0.5, "backward": 2, "all": 1, "lowest": 0.5})
    assert attention_board.scores(row(), "cudnn") == {"forward": 1, "backward": 1, "all": 1, "lowest": 1}
    assert attention_board.scores(row(), "somebody") is None


def test_the_fastest_comes_first_and_a_names_newest_row_counts():
    text = attention_board.boards([row("slow", 0.1), row("quick", 5), row("slow", 0.3), row(device="an A100")])
    first, second = text.split("\n\n")
    lines = first.splitlines()
    assert lines[0] == "an H100, bf16, forward and backward, 1 shapes" and second.startswith("an A100")
    assert [line.split()[1] for line in lines[3:]] == ["quick", "cudnn", "slow", "flash"]
    assert "0.600" in lines[5] and "abababab" in lines[5]


def test_rows_are_added_and_read_again(tmp_path):
    path = tmp_path / "board.json"
    attention_board.add(path, row("first"))
    assert attention_board.add(path, row("second")) == attention_board.read(path)
    assert [each["name"] for each in attention_board.read(path)] == ["first", "second"]
    assert os.listdir(tmp_path) == ["board.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged, and left as it is"),
        ("[]", "is damaged.*board must be"),
        ('{"format": 2, "rows": []}', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (lambda board: board["rows"][0].pop("sha256"), "sha256"),
        (lambda board: board["rows"][0]["points"][0]["over"].pop(YOURS), r"board.rows\[0\].points\[0\] has no 'yours'"),
        (lambda board: board["rows"][0].update(base="none"), r"points\[0\] has no 'none'"),
        (lambda board: board["rows"][0]["points"][0]["over"][YOURS].update(ratio=-1), "ratio must be a positive"),
        (lambda board: board.update(format=9), "board.format must be 1"),
    ],
)
def test_a_damaged_board_is_told_and_left_as_it_is(tmp_path, capsys, text, said):
    path = tmp_path / "board.json"
    if callable(text):
        board = {"format": 1, "rows": [row()]}
        text(board)
        text = json.dumps(board)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with pytest.raises(BoardError, match=said):
        attention_board.read(path)
    with pytest.raises(BoardError, match=said):
        attention_board.add(path, row())
    assert attention_leaderboard.main(["mine.py", "--board", str(path)]) == 1
    assert "is damaged" in capsys.readouterr().err and path.read_bytes() == before


def test_a_board_that_cannot_be_is_told_before_anything_is_measured(tmp_path):
    with pytest.raises(BoardError, match=r"the folder of .* is not there"):
        attention_board.read(tmp_path / "nowhere" / "board.json")
    with pytest.raises(BoardError, match=r"cannot be read: .* directory"):
        attention_board.read(tmp_path)


def test_a_write_that_fails_leaves_the_board_and_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "board.json"
    attention_board.add(path, row())
    before = path.read_text()

    def full(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BoardError, match="cannot be written: no space left"):
        attention_board.add(path, row("second"))
    assert path.read_text() == before and os.listdir(tmp_path) == ["board.json"]
    with pytest.raises(BoardError, match=r"is left as it is: board\.rows"):
        attention_board.add(path, row("third", sha256=3))
