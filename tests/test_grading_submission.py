"""What counts of a submission: the lab's own modules, wherever they lie, and a note for everything that does not."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from submitted_files import KINDS, packed, written

from grading import archives
from grading.archives import MAX_FILE, UnreadableSubmission, archive_stem
from grading.lab import ROOT, find_lab
from grading.submission import HandedIn, Submission, collect

LAB = find_lab("lab1")
STUB = (LAB.released / "waves.py").read_bytes()
DONE, OTHER = b"x = 1\n", b"y = 2\n"


def read(path: Path) -> Submission:
    """The submission of eve, which is one file or folder."""
    return collect(HandedIn("eve", (("", path),)), LAB)


def from_files(tmp_path: Path, files: Mapping[str, bytes]) -> Submission:
    """The submission of eve, which is a folder of these files."""
    return read(written(tmp_path / "eve", files))


def noted(submission: Submission, *words: str) -> bool:
    """Whether one of the notes has all of these words."""
    return any(all(word in note for word in words) for note in submission.notes)


# ---- where the lab's files are -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", KINDS)
@pytest.mark.parametrize("inside", ["", "eve-main/labs/lab1_roofline/", "./"])
def test_files_are_found_in_every_kind_of_archive_at_the_top_or_below(tmp_path, ending, inside):
    files = {f"{inside}warp.py": DONE, "__MACOSX/._warp.py": b"?", f"{inside}.hidden.py": b"?"}
    (tmp_path / f"eve{ending}").write_bytes(packed(files, ending))
    submission = read(tmp_path / f"eve{ending}")
    assert submission.files == {"warp.py": DONE}
    assert len(submission.notes) == 1 and noted(submission, "taken as handed out: __init__.py")


@pytest.mark.parametrize("ending", KINDS)
def test_an_archive_lies_in_a_folder_or_in_another_archive(tmp_path, ending):
    inner = packed({"labs/lab1_roofline/warp.py": DONE}, ending)
    assert from_files(tmp_path, {f"lab1{ending}": inner}).files == {"warp.py": DONE}
    for outer in KINDS:
        path = tmp_path / f"bob{outer}"
        path.write_bytes(packed({f"hand in/lab1{ending}": inner}, outer))
        assert read(path).files == {"warp.py": DONE}


def test_an_archive_is_known_by_what_it_holds_where_its_name_is_wrong(tmp_path):
    assert from_files(tmp_path, {"lab1.zip": packed({"warp.py": DONE}, ".tar.gz")}).files == {"warp.py": DONE}
    assert read(written(tmp_path / "bob", {"lab1.tar": packed({"warp.py": DONE})})).files == {"warp.py": DONE}
    assert archive_stem("eve.v2.TAR.GZ") == "eve.v2" and archive_stem("eve.gz") is None


def test_the_course_handed_in_as_a_whole_is_graded_on_its_labs_and_flagged(tmp_path):
    """It is the course as handed out, with the solutions that come first in the alphabet or the last."""
    solution = {f"solutions/lab1_roofline/{p.name}": p.read_bytes() for p in LAB.solution.glob("*.py")}
    work = {f"labs/lab1_roofline/{p.name}": p.read_bytes() for p in LAB.released.glob("*.py")}
    for course in (solution | work, work | solution):
        submission = from_files(tmp_path, {f"course-main/{name}": content for name, content in course.items()})
        assert submission.files == {p.name: p.read_bytes() for p in LAB.released.glob("*.py")}
        assert noted(submission, "solutions/lab1_roofline/ was left out", "only labs/lab1_roofline is graded")


def test_the_courses_own_files_are_not_listed_and_changed_or_further_ones_are(tmp_path):
    names = ("utils/simt/warp.py", "utils/operators.py", "LICENSE", "labs/lab2_triton_kernels/tuning.py")
    course = {name: (ROOT / name).read_bytes() for name in names} | {"labs/lab1_roofline/warp.py": DONE}
    assert len(from_files(tmp_path, course).notes) == 1  # what is missing
    changed = {"utils/operators.py": DONE, "utils/runtime.py": DONE, "essay.txt": b""}
    submission = read(written(tmp_path / "bob", course | changed))
    assert noted(submission, "utils/operators.py was ignored") and len(submission.notes) == 3
    assert noted(submission, "not graded, since no module of the lab: essay.txt, utils/ (1 file)")


def test_solutions_alone_are_no_submission(tmp_path):
    files = {f"Solutions/lab1_roofline/{p.name}": p.read_bytes() for p in LAB.solution.glob("*.py")}
    with pytest.raises(UnreadableSubmission, match=r"no file of lab1.*solutions/lab1_roofline/ was left out"):
        from_files(tmp_path, files)


def test_a_solution_that_was_copied_into_the_lab_is_flagged(tmp_path):
    copied = (LAB.solution / "waves.py").read_bytes()
    submission = from_files(tmp_path, {"labs/lab1_roofline/waves.py": copied})
    assert submission.files == {"waves.py": copied} and noted(submission, "waves.py is a copy of the course's solution")


def test_labs_count_before_a_folder_that_holds_more(tmp_path):
    more = {f"backup/{name}.py": DONE for name in ("waves", "warp", "rates")}
    submission = from_files(tmp_path, more | {"labs/lab1_roofline/waves.py": OTHER})
    assert submission.files == {"waves.py": OTHER}
    assert noted(submission, "backup/warp.py was ignored", "labs/lab1_roofline/ were graded")


def test_a_module_of_the_same_name_in_another_lab_does_not_count(tmp_path):
    """Labs share names such as ``tuning.py``: nbgrader's folder of a student holds all labs."""
    with pytest.raises(UnreadableSubmission, match="no file of lab1_roofline"):
        from_files(tmp_path, {"lab2_triton_kernels/rates.py": DONE, "labs/lab3/rates.py": DONE})
    submission = read(written(tmp_path / "bob", {"lab2/rates.py": DONE, "lab2/warp.py": DONE, "lab1/rates.py": OTHER}))
    assert submission.files == {"rates.py": OTHER}


def test_two_versions_that_differ_are_an_error_and_an_untouched_one_does_not_count(tmp_path):
    with pytest.raises(UnreadableSubmission, match=r"different versions of the lab, in a/ and in b/; hand in one"):
        from_files(tmp_path, {"a/waves.py": DONE, "b/waves.py": OTHER})
    submission = read(written(tmp_path / "bob", {"a/waves.py": STUB, "b/waves.py": DONE}))
    assert submission.files == {"waves.py": DONE} and noted(submission, "a/waves.py was ignored")
    assert read(written(tmp_path / "cyd", {"a/waves.py": DONE, "b/waves.py": DONE})).files == {"waves.py": DONE}


# ---- near names ----------------------------------------------------------------------------------------------------

NEAR = ["waves-1.py", "waves (1).py", "waves copy.py", "waves copy 2.py", "waves - Copy (3).py", "waves_v2.py"]
NEAR += ["Waves.py", "waves.PY", "waves.py.txt", "waves_final.py", "waves - Kopie.py"]


@pytest.mark.parametrize("name", NEAR)
def test_a_near_name_counts_where_the_module_is_missing_or_as_handed_out(tmp_path, name):
    for number, beside in enumerate(({}, {"waves.py": STUB}, {"warp.py": DONE})):
        submission = read(written(tmp_path / str(number), {name: DONE, **beside}))
        assert submission.files["waves.py"] == DONE and noted(submission, f"{name} was graded as waves.py")
        assert name not in submission.files


@pytest.mark.parametrize("name", NEAR)
def test_a_near_name_beside_a_module_that_was_worked_on_is_not_graded_and_noted(tmp_path, name):
    submission = from_files(tmp_path, {name: DONE, "waves.py": OTHER})
    assert submission.files["waves.py"] == OTHER and noted(submission, f"{name} was not graded: waves.py was")


def test_of_two_near_names_none_is_guessed(tmp_path):
    submission = from_files(tmp_path, {"waves-1.py": DONE, "waves-2.py": OTHER, "waves.py": STUB})
    assert submission.files == {"waves.py": STUB}
    assert noted(submission, "not graded: waves-1.py, waves-2.py", "not clear which one is meant")


def test_a_module_of_the_students_own_is_no_near_name(tmp_path):
    files = {"warp.py": DONE, "helper.py": DONE, "waves2.py": DONE, "torch/__init__.py": b"", "rates.json": b"{}"}
    submission = from_files(tmp_path, files)
    assert submission.files == {"warp.py": DONE, "helper.py": DONE, "waves2.py": DONE}
    assert noted(submission, "helper.py is not a file of the lab; your modules may import it")


def test_every_file_that_was_not_graded_is_named(tmp_path):
    files = {"labs/lab1_roofline/warp.py": DONE, "essay.txt": b"sorry", "labs/lab1_roofline/plot.png": b"png"}
    files |= {f"labs/lab2_triton_kernels/{name}": DONE for name in ("gelu.py", "softmax.py")}
    files |= {"labs/lab1_roofline/exercises/waves.py": b"def check_waves(*_): pass"}
    files |= {"labs/lab1_roofline/exercises/rates.py": (LAB.released / "exercises" / "rates.py").read_bytes()}
    submission = from_files(tmp_path, files | {f"data/{n}.csv": b"" for n in range(9)})
    (note,) = [note for note in submission.notes if note.startswith("not graded")]
    expected = ["essay.txt", "data/ (9 files)", "labs/lab1_roofline/plot.png", "labs/lab2_triton_kernels/ (2 files)"]
    expected += ["labs/lab1_roofline/exercises/ (1 file)"]  # the other one is as it was handed out
    assert sorted(note.removeprefix("not graded, since no module of the lab: ").split(", ")) == sorted(expected)


# ---- what is wrong with an archive ---------------------------------------------------------------------------------


def test_links_and_pipes_are_ignored_with_a_note(tmp_path):
    folder = written(tmp_path / "eve", {"warp.py": DONE, "residual.py": b"#" * (MAX_FILE + 1)})
    (folder / "waves.py").symlink_to("/etc/passwd")
    (folder / "home").symlink_to("/")
    os.mkfifo(folder / "rates.py")
    submission = read(folder)
    assert set(submission.files) == {"warp.py"}
    assert sum("was ignored" in note for note in submission.notes) == 4
    (tmp_path / "bob").symlink_to(folder)
    with pytest.raises(UnreadableSubmission, match="is a link"):
        read(tmp_path / "bob")


def test_members_that_point_out_of_an_archive_and_links_in_it_are_ignored(tmp_path):
    with zipfile.ZipFile(tmp_path / "eve.zip", "w") as archive:
        for name in ("warp.py", "../waves.py", "/rates.py", "C:/prediction.py"):
            archive.writestr(name, DONE)
        link = zipfile.ZipInfo("residual.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with tarfile.open(tmp_path / "eve.tgz", "w:gz") as archive:
        for name in ("warp.py", "../waves.py", "/rates.py"):
            member = tarfile.TarInfo(name)
            member.size = len(DONE)
            archive.addfile(member, io.BytesIO(DONE))
        for name, kind in (("residual.py", tarfile.SYMTYPE), ("operators.py", tarfile.LNKTYPE), ("x", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    for path, ignored in ((tmp_path / "eve.zip", 4), (tmp_path / "eve.tgz", 5)):
        submission = read(path)
        assert submission.files == {"warp.py": DONE}
        assert sum("was ignored" in note for note in submission.notes) == ignored


def _members(count: int) -> dict[str, bytes]:
    return {f"{number}.txt": b"" for number in range(count)}


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz"])
@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({f"{number}.py": bytes(MAX_FILE) for number in range(9)}, "unpacks to more than 32 MiB"),
        (_members(archives.MAX_MEMBERS + 1), "more than 5,000 files"),
    ],
    ids=["large", "many"],
)
def test_an_archive_that_is_too_large_inside_is_unreadable(tmp_path, ending, files, complaint):
    (tmp_path / f"eve{ending}").write_bytes(packed(files, ending))
    with pytest.raises(UnreadableSubmission, match=complaint):
        read(tmp_path / f"eve{ending}")


def test_limits_hold_for_all_archives_of_a_submission_together(tmp_path, monkeypatch):
    inner = {f"{number}.tar.gz": packed({"big.bin": bytes(2**20)}, ".tar.gz") for number in range(8)}
    monkeypatch.setattr(archives, "MAX_UNPACKED", 4 * 2**20)
    with pytest.raises(UnreadableSubmission, match="unpacks to more than 4 MiB"):
        from_files(tmp_path, inner)
    (tmp_path / "bob.tar.gz").write_bytes(gzip.compress(bytes(2**23)))  # a tar of nothing
    (tmp_path / "cyd.tar.gz").write_bytes(packed({"warp.py": DONE, "big.bin": bytes(2**23)}, ".tar.gz"))
    with pytest.raises(UnreadableSubmission, match="unpacks to more than 4 MiB"):
        read(tmp_path / "cyd.tar.gz")
    with pytest.raises(UnreadableSubmission):
        read(tmp_path / "bob.tar.gz")


def test_archives_are_opened_to_a_depth_and_no_further(tmp_path):
    content = packed({"warp.py": DONE})
    for depth in range(1, 6):
        (tmp_path / f"{depth}.zip").write_bytes(content)
        if depth <= archives.MAX_DEPTH:
            assert read(tmp_path / f"{depth}.zip").files == {"warp.py": DONE}
        else:
            with pytest.raises(UnreadableSubmission, match=r"was not opened: 3 archives lie around it"):
                read(tmp_path / f"{depth}.zip")
        content = packed({"inner.zip": content})


@pytest.mark.parametrize("ending", KINDS)
def test_an_archive_that_is_cut_or_none_at_all_is_unreadable_and_says_why(tmp_path, ending):
    whole = packed({"warp.py": os.urandom(9000)}, ending)
    for number, content in enumerate((b"", b"no archive", whole[: len(whole) // 4])):
        path = tmp_path / f"{number}{ending}"
        path.write_bytes(content)
        with pytest.raises(UnreadableSubmission, match="cannot be read: "):
            read(path)
        beside = read(written(tmp_path / str(number), {"waves.py": DONE, f"more{ending}": content}))
        assert beside.files == {"waves.py": DONE} and noted(beside, f"more{ending} cannot be read: ")


def test_an_encrypted_zip_and_archives_of_other_kinds_say_what_to_hand_in(tmp_path):
    content = bytearray(packed({"warp.py": DONE}))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    (tmp_path / "eve.zip").write_bytes(content)
    with pytest.raises(UnreadableSubmission, match="encrypted"):
        read(tmp_path / "eve.zip")
    for name in ("lab1.7z", "lab1.rar", "waves.py.gz"):
        with pytest.raises(UnreadableSubmission, match=r"no file of lab1.*was not opened: only \.zip and \.tar"):
            read(written(tmp_path / name.replace(".", "-"), {name: b"?"}))


def test_a_submission_without_a_file_of_the_lab_is_unreadable_and_says_what_was_in_it(tmp_path):
    for files in ({}, {"essay.txt": b"sorry"}, {"__init__.py": b""}):
        with pytest.raises(UnreadableSubmission, match="no file of lab1_roofline"):
            read(written(tmp_path / str(len(files)), files))


def test_names_of_hostile_length_and_kind_take_no_time_and_are_left_out(tmp_path):
    long = ["_1" * 30_000, "x" * 30_000, "exercises/" + "x" * 300, "waves" + " copy" * 10_000, "\x1b[31mred", "a\nb"]
    (tmp_path / "eve.zip").write_bytes(packed({f"{name}.py": DONE for name in long} | {"warp.py": DONE}))
    submission = read(tmp_path / "eve.zip")
    assert submission.files == {"warp.py": DONE}
    assert all(note.isprintable() and len(note) < 2000 for note in submission.notes)


def test_nothing_is_written_by_reading(tmp_path):
    before = set(ROOT.parent.iterdir()), set(Path("/tmp").glob("waves*"))
    (tmp_path / "eve.zip").write_bytes(packed({"../waves.py": DONE, "warp.py": DONE}))
    read(tmp_path / "eve.zip")
    assert (set(ROOT.parent.iterdir()), set(Path("/tmp").glob("waves*"))) == before
    assert [path.name for path in tmp_path.iterdir()] == ["eve.zip"]
