"""What compute-sanitizer is given to watch, without a GPU: lab 3's kernels for Hopper's, and a tool of paper."""

from __future__ import annotations

import pytest

from benchmarks import hopper_races
from benchmarks import hopper_sanitize as sanitize
from utils import runtime


def test_the_sanitizers_cases_meet_every_head_dim_mode_and_ragged_edge():
    cases = list(sanitize.cases())
    assert len(cases) == len(set(cases)) == 3 * 4 * 2
    assert {shape[5] for shape, *_ in cases} == {64, 128, 256} and len({dtype for _, dtype, _ in cases}) == 2
    assert any(shape[6] and shape[3] > shape[4] for shape, *_ in cases)  # queries that see no key


def test_the_sanitizers_cases_are_right_and_a_wrong_result_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "SIZES", ((1, 2, 1, 6, 9, True), (1, 1, 1, 7, 4, True)))
    assert sanitize.run_cases([64]) == 0
    assert capsys.readouterr().out.count("ok    ") == 4
    real = sanitize.attention

    def broken(*arguments):
        raise ValueError("no such instruction")

    monkeypatch.setattr(sanitize, "attention", broken)
    assert sanitize.run_cases([64]) == 1 and "ValueError: no such instruction" in capsys.readouterr().out
    monkeypatch.setattr(sanitize, "attention", lambda *arguments: (-real(*arguments)[0], *real(*arguments)[1:]))
    assert sanitize.run_cases([64]) == 1
    assert "WRONG deterministic, float16, B=1 Hq=2 Hkv=1 Nq=6 Nk=9 D=64, causal o is off by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "said", "found"),
    [
        (0, "ok    a case\n========= ERROR SUMMARY: 0 errors", (0, 1, "ERROR SUMMARY: 0 errors")),
        (99, "========= Invalid write\n========= ERROR SUMMARY: 3 errors", (99, 0, "ERROR SUMMARY: 3 errors")),
        (0, "ok    a case\n========= Device not supported", (1, 1, "none")),
    ],
)
def test_what_a_tool_found_decides(monkeypatch, tmp_path, capsys, status, said, found):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$* $PYTORCH_NO_CUDA_MEMORY_CACHING"\ncat <<END\n{said}\nEND\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    result = sanitize.inside("memcheck", [128])
    assert (result["status"], result["cases"], result["summary"]) == found
    out = capsys.readouterr().out
    assert f"memcheck: status {found[0]}" in out
    if found[0]:  # all that was said is shown
        assert "--tool memcheck --error-exitcode 99" in out and "hopper_sanitize --head-dims 128 1\n" in out


def test_a_tool_that_takes_too_long_is_stopped_with_what_it_started(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n/bin/sleep 60 & wait\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    with pytest.raises(RuntimeError, match=r"compute-sanitizer --tool racecheck was not done after 0\.2 s"):
        sanitize.inside("racecheck", timeout=0.2)


def test_without_the_tool_or_a_gpu_the_sanitizer_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="compute-sanitizer is not on the PATH"):
        sanitize.inside("memcheck")
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    assert sanitize.main([]) == 1 and "needs a CUDA GPU" in capsys.readouterr().out


def report(*places: tuple[str, int]) -> str:
    """A report of racecheck's on these places."""
    first, *others = (f"access at kernel+0x1d0 in {file}:{line}" for file, line in places)
    lines = [f"========= Error: Race reported between Read {first}"]
    return "\n".join([*lines, *(f"=========     and Write {other} [3 hazards]" for other in others), "========= "])


def starting(line: str) -> tuple[str, int]:
    """Where the forward kernel's file has the first line that begins like this."""
    [path] = [path for path in hopper_races.FILES if path.name == "forward.py"]
    return path.name, 1 + [each.startswith(line) for each in path.read_text().splitlines()].index(True)


KERNEL = starting("def hopper_forward_kernel(")
BRANCH = starting("    if G == 2:")
TILE = starting("    s = step % S")


def test_how_partitions_start_is_told_from_what_kernels_do():
    said = "\n".join([report(KERNEL, KERNEL, BRANCH), report(KERNEL, TILE), report(("elsewhere.py", 3), KERNEL)])
    found = hopper_races.reports(said.splitlines())
    assert found == ([(KERNEL, TILE), (("elsewhere.py", 3), KERNEL)], 1)
    assert hopper_races.reports(["ok    a case", "========= RACECHECK SUMMARY: 0 hazards"]) == ([], 0)
    with pytest.raises(ValueError, match="no place in racecheck's line"):
        hopper_races.reports(["========= Error: Race reported between Read access at kernel+0x1d0"])


def test_every_kernel_with_partitions_is_known_and_no_other_function():
    known = {path.name: hopper_races.start_places(path) for path in hopper_races.FILES}
    assert {name for name, places in known.items() if places} == {
        "forward.py", "backward.py", "backward_wide.py", "hopper_control.py",
    }  # fmt: skip
    assert KERNEL in known["forward.py"] and BRANCH in known["forward.py"] and TILE not in known["forward.py"]


@pytest.mark.parametrize(("place", "status"), [(BRANCH, 0), (TILE, 99)])
def test_racecheck_fails_for_reports_of_the_kernels_own_alone(monkeypatch, tmp_path, capsys, place, status):
    tool = tmp_path / "compute-sanitizer"
    said = f"ok    a case\n{report(KERNEL, place)}\n========= RACECHECK SUMMARY: 1 hazard displayed"
    tool.write_text(f"#!/bin/sh\ncat <<END\n{said}\nEND\nexit {sanitize.FOUND}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    assert sanitize.inside("racecheck", [64, 256]) == {
        "status": status, "summary": "RACECHECK SUMMARY: 1 hazard displayed", "cases": 2, "triton": 2 * (not status),
    }  # fmt: skip
    assert ("Race reported" in capsys.readouterr().out) == bool(status)
    found = sanitize.controls()
    assert {name: item["own"] for name, item in found.items()} == dict.fromkeys(hopper_races.CONTROLS, bool(status))


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["ok    a case", report(KERNEL, BRANCH)], 0),
        (["WRONG a case o is off by 2, allowed 0.03", report(KERNEL, BRANCH)], 1),
        (["ok    a case", *[report(KERNEL, BRANCH)] * (sanitize.PRINTED - 1)], 0),
        (["ok    a case", *[report(KERNEL, BRANCH)] * sanitize.PRINTED], 99),
        (["ok    a case"], 99),
    ],
    ids=["as Triton starts", "wrong result", "all printed", "perhaps cut", "found but not said"],
)
def test_reports_of_how_partitions_start_excuse_nothing_else(monkeypatch, tmp_path, lines, status):
    tool = tmp_path / "compute-sanitizer"
    said = "\n".join([*lines, "========= RACECHECK SUMMARY: some hazards displayed"])
    tool.write_text(f"#!/bin/sh\ncat <<END\n{said}\nEND\nexit {sanitize.FOUND}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    assert sanitize.inside("racecheck", [64])["status"] == status
