"""What compute-sanitizer is given to watch, without a GPU: lab 3's kernels for Hopper's, and a tool of paper."""

from __future__ import annotations

import re
import types

import pytest
import triton

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


REPORT = "========= Error: Race reported between Read access at kernel+0x1d0 in forward.py:3"


def test_racecheck_is_given_kernels_that_start_by_atomics_and_every_report_counts(monkeypatch, tmp_path, capsys):
    tool = tmp_path / "compute-sanitizer"
    lines = ["ok    a case", "ok    another", REPORT, "=========     and Write access at kernel+0x20 in forward.py:7"]
    clean = "ok    a case\nok    another\n========= RACECHECK SUMMARY: 0 hazards displayed"
    dirty = "\n".join([*lines, REPORT, "========= RACECHECK SUMMARY: 2 hazards displayed"])
    tool.write_text(
        f"#!/bin/sh\ncase \"$*\" in *atomic-starts* | *waits*) echo '{clean}';; "
        f"*) echo '{dirty}'; exit {sanitize.FOUND};; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    summary = "RACECHECK SUMMARY: 0 hazards displayed"
    assert sanitize.inside("racecheck", [64, 256]) == {"status": 0, "summary": summary, "cases": 4, "races": 0}
    as_compiled = sanitize.inside("racecheck", [64, 256], atomic_starts=False)
    assert (as_compiled["status"], as_compiled["cases"], as_compiled["races"]) == (sanitize.FOUND, 4, 4)
    assert "Race reported between Read" in capsys.readouterr().out
    assert sanitize.beside() == {"as compiled": 6, **dict.fromkeys(hopper_races.CONTROLS, 2), "waits": 0}
    assert sanitize.inside("memcheck", [64])["races"] == 2  # whose kernels are as they were compiled


@pytest.fixture
def compiler():
    """Triton's settings, which are put back."""
    hook, folder = triton.knobs.runtime.add_stages_inspection_hook, triton.knobs.cache.dir
    yield triton.knobs
    triton.knobs.runtime.add_stages_inspection_hook, triton.knobs.cache.dir = hook, folder


def test_cases_run_with_kernels_that_start_by_atomics(monkeypatch, compiler):
    monkeypatch.setattr(sanitize, "SIZES", ((1, 1, 1, 4, 4, True),))
    folder = compiler.cache.dir
    assert sanitize.run_cases([64]) == 0 and compiler.runtime.add_stages_inspection_hook is None
    for _ in range(2):
        assert sanitize.run_cases([64], atomic_starts=True) == 0
        assert compiler.runtime.add_stages_inspection_hook() == ("atomic_starts", "atomic_starts")
        assert compiler.cache.dir == f"{folder}/atomic_starts"


#: What Triton makes of a start, in a few lines: six bytes of three words, and those of the end.
PTX = """
	st.shared.b32 	[global_smem+900], 7;
	st.shared.v2.b32 	[global_smem+1004], {0, 50397698};
	st.shared.b32 	[global_smem+1012], -2;
	barrier.sync 	1;
$L__BB0_2:
	barrier.sync 	1;
	mov.b32 	%r9, global_smem;
	add.s32 	%r8, %r9, %r3;
	.loc	1 30 5
	ld.shared.b8 	%r7, [%r8+1000];
	setp.eq.b32 	%p1, %r7, 0;
$L__BB0_3:
	bar.sync 	3, 128;
	ld.shared.b8 	%r1, [%r8+2000];
	st.shared.v2.b32 	[global_smem+1004], {67372036, 67372036};
	st.shared.v4.b32 	[global_smem+1036], {1, 2, 3, 4};
"""


def test_nothing_but_the_bytes_that_start_partitions_becomes_atomic():
    before, after = PTX.splitlines(), hopper_races.atomic_starts(PTX, 4).splitlines()
    changed = [index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    assert [before[index].split()[0] for index in changed] == [
        "st.shared.v2.b32", "st.shared.b32", "ld.shared.b8", "st.shared.v2.b32",
    ]  # fmt: skip
    first, second, read, end = (after[index] for index in changed)
    assert re.findall(r"mov\.b32 new, (-?\d+); atom\.shared\.exch\.b32 old, \[global_smem\+(\d+)\]", first) == [
        ("0", "1004"), ("50397698", "1008"),
    ]  # fmt: skip
    assert "new, -2; atom.shared.exch.b32 old, [global_smem+1012], new;" in second and end.count("exch") == 2
    assert "add.u32 place, %r8, 1000;" in read and "and.b32 word, word, 255;" in read and "ld.shared" not in read
    narrow = hopper_races.atomic_starts(PTX.replace("%r7", "%rs7"), 4)
    assert "cvt.u16.u32 %rs7, word; }" in narrow and "mov.b32 %r7, word; }" in read
    without = PTX.replace("barrier.sync", "bar.sync")
    assert hopper_races.atomic_starts(without, 4) == without


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("ld.shared.b8 \t%r7", "ld.shared.b32 \t%r7", "read 0 bytes"),
        ("\tld.shared.b8 \t%r1, [%r8+2000];", "\tbarrier.sync 1;\n\tld.shared.b8 \t%r1, [%r8+2000];", "read 2 bytes"),
        ("mov.b32 \t%r9, global_smem;", "ld.shared.b32 \t%r9, [%r3];", "read 0 bytes"),
        ("st.shared.b32 \t[global_smem+1012]", "st.shared.b16 \t[global_smem+1012]", "written as b16"),
        ("[global_smem+1004]", "[global_smem+904]", "written 1 times"),
    ],
)
def test_a_start_of_another_form_is_refused(old, new, error):
    assert old in PTX
    with pytest.raises(ValueError, match=error):
        hopper_races.atomic_starts(PTX.replace(old, new), 4)


def test_triton_compiles_through_the_hook_and_keeps_it_apart(compiler):
    folder = compiler.cache.dir
    kernel = hopper_races.atomic_starts(PTX, 4)
    for change, name, wanted in (
        (None, "atomic_starts", kernel),
        (hopper_races.without_barriers, "atomic_starts_without_barriers", kernel.replace("bar.sync \t3, 128;", "")),
    ):
        compiler.cache.dir = folder
        hopper_races.install(change)
        hook = compiler.runtime.add_stages_inspection_hook
        stages = {"ttgir": str, "ptx": lambda source, metadata: source}
        assert hook(None, stages, types.SimpleNamespace(num_warps=4), "gluon", 90) is None
        assert stages["ptx"](PTX, {}) == wanted != PTX and stages["ttgir"] is str
        assert hook() == (name, name) and compiler.cache.dir == f"{folder}/{name}"
    with pytest.raises(ValueError, match="no barrier to take out"):
        hopper_races.without_barriers("barrier.sync 1;")
