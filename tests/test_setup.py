"""`make` on a bare machine: which Python it takes, what it says without a network, and what it repairs."""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from utils import installation
from utils.notebooks import ROOT

TOOLS = ("sh", "make", "awk", "basename", "cat", "cp", "grep", "id", "ls", "mkdir", "rm", "touch")
MESSAGE = "This course needs Python 3.11 to 3.14 with the venv module."

#: A Python of some version that makes environments of copies of itself; ``state`` says what each is asked.
FAKE_PYTHON = """\
#!/bin/sh
echo "$(basename $0) $*" >> "$STATE/asked"
case "$*" in
  -c*) exec {real} -c 'import sys; sys.version_info = {version}; sys.modules.update({hidden}); exec(sys.argv[1])' "$2";;
  "-m venv --clear "*)
    rm -rf "$4"; mkdir -p "$4/bin" "$4/lib/python3/site-packages/a-1.dist-info"; cp "$0" "$4/bin/python";;
  "-m utils.installation") test -e "$STATE/environment" && exit "$(cat "$STATE/environment")";;
  *--dry-run*) test ! -e "$STATE/offline" || {{ echo "Retrying (a long story)" >&2; exit 1; }};;
  "-m pip"*"-c constraints.txt"*) test ! -e "$STATE/fails";;
esac
"""
FAKE_UV = """\
#!/bin/sh
echo "uv $*" >> "$STATE/asked"
test "$2" = install && {{ touch "$STATE/fetched"; exit; }}
test -e "$STATE/fetched" && echo "{python}"
"""


class Machine:
    """A folder with the course's Makefile, on a machine that has make, a shell and what ``programs`` holds."""

    def __init__(self, folder: Path) -> None:
        self.course, self.programs, self.state = (folder / name for name in ("course", "programs", "state"))
        for made in (self.course, self.programs, self.state):
            made.mkdir(parents=True)
        for name in ("Makefile", "instructor.mk", "requirements.txt", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.course)
        for name in TOOLS:
            (self.programs / name).symlink_to(shutil.which(name))

    def has(self, name: str, text: str) -> Path:
        program = self.programs / name
        program.write_text(text)
        program.chmod(0o755)
        return program

    def has_python(self, name: str, minor: int, *, without: str = "") -> Path:
        hidden = {without: None} if without else {}
        text = FAKE_PYTHON.format(real=sys.executable, version=(3, minor, 0), hidden=str(hidden).replace("'", '"'))
        return self.has(name, text)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.programs), "STATE": str(self.state)}
        return subprocess.run(
            ["make", "-s", *arguments], cwd=self.course, env=environment, capture_output=True, text=True, timeout=60
        )

    def asked(self) -> list[str]:
        """What the programs were asked since the last call, in order."""
        path = self.state / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- which Python ----
@pytest.mark.parametrize(
    ("present", "taken"),
    [
        ({"python3": 14}, "python3"),
        ({"python3": 11}, "python3"),
        ({"python3": 10, "python3.12": 12, "python3.11": 11}, "python3.12"),
        ({"python3": 15, "python3.14": 14, "python3.13": 13}, "python3.14"),
        ({"python3": 10}, None),
        ({"python3": 15}, None),
        ({}, None),
    ],
)
def test_the_newest_python_that_the_course_runs_on_makes_the_environment(machine, present, taken):
    for name, minor in present.items():
        machine.has_python(name, minor)
    done = machine.make("runtime")
    makers = [line.split()[0] for line in machine.asked() if "-m venv" in line]
    assert makers == ([taken] if taken else [])
    assert (done.returncode == 0) == (taken is not None) == (MESSAGE not in done.stdout)
    if not taken:
        assert f"{MESSAGE} None was found.\nInstall one (on Debian and Ubuntu: apt install" in done.stdout


def test_a_python_without_the_parts_that_make_environments_is_passed_over(machine):
    machine.has_python("python3.13", 13, without="ensurepip")
    machine.has_python("python3.12", 12)
    assert machine.make("runtime").returncode == 0
    assert [line.split()[0] for line in machine.asked() if "-m venv" in line] == ["python3.12"]


def test_uv_gives_a_python_where_no_other_fits_and_only_there(machine):
    fetched = machine.has_python("fetched-by-uv", 13)
    machine.has("uv", FAKE_UV.format(python=fetched))
    machine.has_python("python3", 10)
    assert machine.make("runtime").returncode == 0
    found, make = "uv python find >=3.11,<3.15", "fetched-by-uv -m venv --clear .venv"
    assert machine.asked()[1:5] == [found, "uv python install 3.13", "uv python find 3.13", make]
    shutil.rmtree(machine.course / ".venv")
    assert machine.make("runtime").returncode == 0
    assert machine.asked()[1:3] == [found, make]
    shutil.rmtree(machine.course / ".venv")
    machine.has_python("python3.12", 12)
    assert machine.make("runtime").returncode == 0
    assert not [line for line in machine.asked() if line.startswith("uv")]


def test_a_python_that_was_named_and_does_not_fit_is_said_and_none_is_taken_in_its_place(machine):
    machine.has_python("python3.12", 12)
    machine.has_python("old", 10)
    machine.has("uv", FAKE_UV.format(python="python3.12"))
    for name in ("old", "absent"):
        done = machine.make("runtime", f"PYTHON={name}")
        assert done.returncode and f"{MESSAGE} {name} is not one.\n" in done.stdout
        assert not [line for line in machine.asked() if "-m venv" in line or line.startswith("uv")]


# ---- what is fetched ----
def test_the_first_start_says_how_much_is_fetched_and_pip_shows_what_the_second_fetches_nothing(machine):
    machine.has_python("python3.12", 12)
    first = machine.make("runtime").stdout
    assert (
        "Its packages are fetched once: about 3 GB (with CPU=1, for a machine without an NVIDIA GPU, 0.5 GB)." in first
    )
    (fetching,) = [line for line in machine.asked() if "-c constraints.txt" in line]
    assert "-r requirements.txt" in fetching and " -q" not in fetching
    assert (machine.course / ".venv" / ".lab").read_text() == "a-1.dist-info\n"
    (machine.state / "environment").write_text("0")
    assert machine.make("runtime").stdout == ""
    assert machine.asked() == ["python -m utils.installation", "python -m utils.runtime"]


def test_what_an_installation_for_the_tests_brought_serves_a_student_too(machine):
    machine.has_python("python3.12", 12)
    assert machine.make(".venv/.test").returncode == 0
    (machine.state / "environment").write_text("0")
    machine.asked()
    assert machine.make(".venv/.lab").returncode == 0
    assert machine.asked() == ["python -m utils.installation"]


def test_without_a_network_one_sentence_says_so_and_the_next_make_goes_on(machine):
    machine.has_python("python3.12", 12)
    (machine.state / "offline").touch()
    done = machine.make("runtime")
    said = done.stdout.splitlines()[-1]
    assert done.returncode and said.startswith("Packages must be fetched and no package index answers: connect")
    assert "Retrying" not in done.stdout + done.stderr
    assert not [line for line in machine.asked() if "-c constraints.txt" in line or "runtime" in line]
    (machine.state / "offline").unlink()
    assert machine.make("runtime").returncode == 0
    assert machine.asked()[-1] == "python -m utils.runtime"


def test_an_installation_that_fails_does_not_count(machine):
    machine.has_python("python3.12", 12)
    (machine.state / "fails").touch()
    done = machine.make("runtime")
    assert done.returncode and "The installation has failed; pip says why above" in done.stdout
    assert not (machine.course / ".venv" / ".lab").exists()
    assert "python -m utils.runtime" not in machine.asked()


# ---- what is repaired ----
@pytest.mark.parametrize(
    ("found", "made_anew", "installed"),
    [(installation.WHOLE, 0, 0), (installation.INCOMPLETE, 0, 1), (installation.UNUSABLE, 1, 1), (127, 1, 1)],
)
def test_every_command_repairs_what_is_broken_and_nothing_else(machine, found, made_anew, installed):
    machine.has_python("python3.12", 12)
    assert machine.make("runtime").returncode == 0
    machine.asked()
    (machine.state / "environment").write_text(str(found))
    done = machine.make("runtime")
    assert done.returncode == 0, done.stdout
    asked = machine.asked()
    assert len([line for line in asked if "-m venv --clear" in line]) == made_anew
    assert len([line for line in asked if "-c constraints.txt" in line]) == installed
    assert ("does not work, or was left half made. It is made anew." in done.stdout) == bool(made_anew)


@pytest.fixture
def environment(tmp_path: Path) -> tuple[Path, Path]:
    """An environment with pip and two packages that an installation brought, and its folder of packages."""
    prefix, packages = tmp_path / "env", tmp_path / "env" / "lib" / "site-packages"
    files = {"code.py": "x = 1\n", "__init__.py": "", "__pycache__/code.pyc": "cached"}
    for name in ("pip", "one", "two"):
        about = packages / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        rows = []
        for file, text in files.items():
            (packages / name / file).parent.mkdir(parents=True, exist_ok=True)
            (packages / name / file).write_text(text)
            rows.append((f"{name}/{file}", "", "" if "pyc" in file else len(text)))
        (about / "INSTALLER").write_text("pip\n")
        with open(about / "RECORD", "w", newline="") as record:
            csv.writer(record).writerows([*rows, (f"{about.name}/INSTALLER", "", 4), (f"{about.name}/RECORD", "", "")])
    (prefix / "bin").mkdir()
    (prefix / "bin" / "pip").write_text(f"#!{prefix}/bin/python\n")
    (prefix / ".lab").write_text("one-1.0.dist-info\ntwo-1.0.dist-info\n")
    return prefix, packages


def test_an_environment_that_is_whole_is_left_alone(environment):
    prefix, packages = environment
    before = sorted(prefix.rglob("*"))
    assert installation.is_usable(prefix, packages)
    assert installation.take_off_incomplete(prefix, packages) == []
    assert sorted(prefix.rglob("*")) == before
    shutil.rmtree(packages / "one" / "__pycache__")
    assert installation.take_off_incomplete(prefix, packages) == []


@pytest.mark.parametrize("lost", ["two/code.py", "two-1.0.dist-info/RECORD", "two-1.0.dist-info/INSTALLER"])
def test_a_package_that_lacks_a_file_is_installed_again(environment, lost):
    prefix, packages = environment
    (packages / lost).unlink()
    assert installation.take_off_incomplete(prefix, packages) == ["two"]
    assert not (packages / "two-1.0.dist-info").exists() and not (prefix / ".lab").exists()
    assert (packages / "one-1.0.dist-info").is_dir()


def test_an_empty_file_that_held_something_a_torn_record_and_an_absent_package_are_found_too(environment):
    prefix, packages = environment
    (packages / "one" / "code.py").write_text("")
    assert not installation.is_whole(packages / "one-1.0.dist-info")
    (packages / "two-1.0.dist-info" / "RECORD").write_text("two/code.py\n")
    assert not installation.is_whole(packages / "two-1.0.dist-info")
    for name in ("one", "two"):
        shutil.rmtree(packages / f"{name}-1.0.dist-info")
    assert installation.take_off_incomplete(prefix, packages) == ["one", "two"]


def test_only_the_installation_that_lacks_a_package_is_repeated(environment):
    prefix, packages = environment
    (prefix / ".site").write_text("one-1.0.dist-info\n")
    (packages / "two" / "code.py").unlink()
    installation.take_off_incomplete(prefix, packages)
    assert (prefix / ".site").exists() and not (prefix / ".lab").exists()


def test_a_version_that_somebody_put_there_instead_stays(environment):
    prefix, packages = environment
    (packages / "one-1.0.dist-info").rename(packages / "one-2.0.dist-info")
    record = packages / "one-2.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("one-1.0", "one-2.0"))
    assert installation.take_off_incomplete(prefix, packages) == []


def test_an_environment_without_pip_or_in_another_place_is_made_anew(environment):
    prefix, packages = environment
    moved = prefix.rename(prefix.parent / "moved")
    assert not installation.is_usable(moved, moved / "lib" / "site-packages")
    moved.rename(prefix)
    link = prefix.parent / "link"
    link.symlink_to(prefix)
    assert installation.is_usable(link, packages)
    (packages / "pip" / "code.py").unlink()
    assert not installation.is_usable(prefix, packages)


@pytest.mark.parametrize("name", ["jupyterlab", "numpy", "pytest"])
def test_what_a_real_pip_installed_is_whole(name):
    assert installation.is_whole(Path(distribution(name).locate_file("")) / f"{name}-{version(name)}.dist-info")


# ---- the same with a real pip, killed
PACKAGES = ("tqdm", "alpha", "beta", "gamma")


def write_wheel(folder: Path, name: str, files: int = 800) -> None:
    """A wheel of a package of many small modules."""
    about = f"{name}-1.0.dist-info"
    texts = {f"{name}/__init__.py": "x = 1\n"} | {f"{name}/part{i}.py": f"x = {i}\n" for i in range(files)}
    texts[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    texts[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts[f"{about}/RECORD"] = "".join(f"{path},,{len(text)}\n" for path, text in texts.items()) + f"{about}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)


@pytest.mark.thorough
def test_an_installation_that_is_killed_five_times_is_whole_after_the_next_make(tmp_path):
    wheels, course = tmp_path / "wheels", tmp_path / "course"
    for folder in (wheels, course / "utils"):
        folder.mkdir(parents=True)
    for name in PACKAGES:
        write_wheel(wheels, name)
    shutil.copy(ROOT / "Makefile", course)
    shutil.copy(ROOT / "utils" / "installation.py", course / "utils")
    for name, text in (("requirements.txt", "\n".join(PACKAGES)), ("constraints.txt", ""), ("pyproject.toml", "")):
        (course / name).write_text(text)
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    command = ["make", ".venv/.lab", f"PYTHON={sys.executable}"]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=course, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    rng, begin = random.Random(5), time.monotonic()
    assert started().wait(300) == 0
    takes = time.monotonic() - begin
    shutil.rmtree(course / ".venv")
    for _ in range(5):
        process = started()
        try:
            process.wait(rng.uniform(0.1, 1.1) * takes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if modules := sorted(course.glob(".venv/lib/python*/site-packages/*a/part*.py")):
            rng.choice(modules).unlink()
    last = started()
    assert last.wait(300) == 0, last.stdout.read()
    check = "import alpha.part799, beta.part799, gamma.part799, tqdm.part799, pathlib\n"
    check += "print([len(list(pathlib.Path(p.__file__).parent.glob('*.py'))) for p in (alpha, beta, gamma, tqdm)])"
    shown = subprocess.run([course / ".venv/bin/python", "-c", check], capture_output=True, text=True)
    assert shown.stdout == "[801, 801, 801, 801]\n", shown.stderr
    again = subprocess.run([course / ".venv/bin/python", "-m", "utils.installation"], cwd=course)
    assert again.returncode == installation.WHOLE
