"""Whether the environment that runs this is whole: ``make`` asks before every command, and repairs what is not.

    python -m utils.installation

An installation that is killed can leave packages that lack files and yet count as installed, and files can go missing
later. Such a package is taken off pip's list of what is installed, so that the next ``pip install`` brings it again.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
import sysconfig
from pathlib import Path

#: Exit statuses: nothing to do; something must be installed again; only a new environment helps.
WHOLE, INCOMPLETE, UNUSABLE = 0, 3, 4
#: What ``make`` writes when an installation is done: the folder ``NAME-VERSION.dist-info`` of each package, on a line.
STAMPS = (".lab", ".test", ".grading", ".cluster", ".site")


def is_whole(package: Path) -> bool:
    """Whether all files of a package are there, and none is empty that held something.

    Args:
        package: its ``.dist-info`` folder. Caches are not looked at: Python writes them anew.
    """
    try:
        with open(package / "RECORD", encoding="utf-8", newline="") as file:
            sizes = {name: size for name, _, size in csv.reader(file) if "__pycache__" not in name}
        found = ((os.stat(package.parent / name).st_size, size) for name, size in sizes.items())
        # pip writes INSTALLER when the package's files are all there
        return (package / "INSTALLER").is_file() and all(now or size in ("", "0") for now, size in found)
    except (OSError, ValueError):
        return False


def take_off_incomplete(prefix: Path, packages: Path) -> list[str]:
    """Take off pip's list each package that is not whole, and remove the stamps of installations that lack a package.

    Args:
        prefix: the environment, in which the stamps lie.
        packages: its folder ``site-packages``.

    Returns:
        The names of the packages that an installation had brought and that are not there any more.
    """
    for package in packages.glob("*.dist-info"):
        if not is_whole(package):
            shutil.rmtree(package)
    present = {_name(package.name) for package in packages.glob("*.dist-info")}
    lost: set[str] = set()
    for stamp in (prefix / name for name in STAMPS):
        lacking = set(map(_name, stamp.read_text().split())) - present if stamp.is_file() else set()
        if lacking:
            stamp.unlink()
        lost |= lacking
    return sorted(lost)


def _name(folder: str) -> str:
    """The package of a folder ``NAME-VERSION.dist-info``."""
    return folder.split("-")[0]


def is_usable(prefix: Path, packages: Path) -> bool:
    """Whether packages can be installed in an environment: it has pip, and lies where it was made.

    An environment does not survive a move, since the commands in it begin with the path to its Python.
    """
    command = prefix / "bin" / "pip"
    paths = (f"{prefix}/bin/", f"{os.path.realpath(prefix)}/bin/")
    return (
        any(map(is_whole, packages.glob("pip-*.dist-info")))
        and command.is_file()
        and any(path in command.read_text(encoding="utf-8") for path in paths)
    )


def main() -> int:
    """Look at this environment, take off what is incomplete, and say so; returns the exit status."""
    prefix, packages = Path(sys.prefix), Path(sysconfig.get_path("purelib"))
    if not is_usable(prefix, packages):
        return UNUSABLE
    lost = take_off_incomplete(prefix, packages)
    if lost:
        print(f"Files are missing in {prefix.name}. To be installed again: {', '.join(lost)}")
    return INCOMPLETE if lost else WHOLE


if __name__ == "__main__":
    sys.exit(main())
