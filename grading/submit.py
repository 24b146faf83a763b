"""Packs what a student hands in of a lab: one zip with the files that are graded, read as the class grader reads it.

    python -m grading.submit lab3         writes submit/lab3_flash_attention.zip

and says what is in it, which exercises are not written yet, and which modules the grader would refuse to run. It writes
nothing if the grader could not read the zip, or would leave out a file of the lab.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from grading.archives import UnreadableSubmission, zipped
from grading.check_lab import hand_out
from grading.lab import ROOT, Lab, find_lab
from grading.policy import violations
from grading.submission import HandedIn, Submission, collect
from utils.atomic_write import write_atomically
from utils.stubs import STUB

FOLDER = "submit"
PLACE = re.compile(rf'^\s*raise NotImplementedError\("{STUB.pattern}', re.MULTILINE)


def main(arguments: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the command line above on the course in ``root``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grading.submit", description="Pack what you hand in of a lab.")
    parser.add_argument("lab", help="lab3, 3 or lab3_flash_attention")
    options = parser.parse_args(arguments)
    try:
        lab = find_lab(options.lab, root)
        with tempfile.TemporaryDirectory(prefix="submit-") as scratch:
            handed_out = Path(scratch, lab.name)
            hand_out(lab, handed_out)
            content = pack(lab.released, lab.name)
            graded = replace(lab, released=handed_out)
            submission = read(content, lab.released, graded)
            _tell(submission, graded)
    except (ValueError, OSError) as error:
        parser.error(f"nothing was packed: {error}")
    target = root / FOLDER / f"{lab.name}.zip"
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, content)
    size = f"{len(content) / 1024:,.0f} KiB"
    print(f"\n{target.relative_to(root)}, {len(submission.files)} files, {size}: hand in this one file")
    return 0


def pack(folder: Path, name: str) -> bytes:
    """A zip of what counts in a lab's folder, its modules, and of its notebook, as ``labs/<name>/...``."""
    paths = [*folder.glob("*.py"), folder / f"{name}.ipynb"]
    return zipped({f"labs/{name}/{path.name}": path.read_bytes() for path in paths if path.is_file()})


def read(content: bytes, folder: Path, lab: Lab) -> Submission:
    """What the grader takes from the zip.

    Args:
        content: the zip.
        folder: where its files are from.
        lab: the lab, ``lab.released`` as it was handed out.

    Raises:
        UnreadableSubmission: the grader could not read it, or would leave out a file of the lab.
    """
    with tempfile.TemporaryDirectory(prefix="submit-") as scratch:
        archive = Path(scratch, f"{lab.name}.zip")
        archive.write_bytes(content)
        submission = collect(HandedIn("", (("", archive),)), lab)
    ours = (path.name for path in lab.released.iterdir())
    if lost := sorted(name for name in ours if (folder / name).is_file() and name not in submission.files):
        raise UnreadableSubmission("\n".join([f"the grader would not take {', '.join(lost)}", *submission.notes]))
    return submission


def _tell(submission: Submission, lab: Lab) -> None:
    """Print what is in a submission, and what its student should know before it is graded."""
    handed_out = {path.name: path.read_bytes() for path in lab.released.glob("*.py")}
    modules = {name: content for name, content in submission.files.items() if name.endswith(".py")}
    worked_on = [name for name, content in modules.items() if content != handed_out.get(name)]
    print(f"{lab.title}: {', '.join(worked_on) or 'no module'} of yours, {len(modules) - len(worked_on)} as handed out")
    unwritten = {
        found["number"]
        for name, content in (handed_out | modules).items()
        for found in (PLACE if name in worked_on else STUB).finditer(content.decode("utf-8", "replace"))
    }
    left = [exercise for exercise in lab.exercises if exercise.number in unwritten]
    numbers = [exercise.number for exercise in left if not exercise.voluntary]
    print(f"not written yet: {', '.join(numbers) or 'nothing'}")
    if voluntary := [exercise.number for exercise in left if exercise.voluntary]:
        print(f"voluntary, and not written: {', '.join(voluntary)}")
    for note in submission.notes:
        print(f"note: {note}")
    for name in worked_on:
        for violation in violations(modules[name], name, lab):
            print(f"warning: {name}, {violation}; the grader does not run {name} so")


if __name__ == "__main__":
    sys.exit(main())
