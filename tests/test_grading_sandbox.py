"""The sandbox: what a student's code finds in it, what it cannot reach, and how it is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grading import sandbox as module
from grading.lab import ROOT
from grading.sandbox import Sandbox, SandboxUnavailable
from grading.watcher import MIB, Limits

SLEEP = 86_411  # seconds; no other process of this machine sleeps for as long
TIGHT = Limits(seconds=20, memory=300 * MIB, processes=20, scratch=8 * MIB, work=8 * MIB, output=8 * MIB, file=8 * MIB)


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    (tmp_path / "files" / "lab9_x").mkdir(parents=True)
    (tmp_path / "files" / "lab9_x" / "answer.py").write_text("ANSWER = 42\n")
    return tmp_path / "files"


def said(sandbox: Sandbox, source: str) -> str:
    """What a Python program says inside: it writes into the runtime folder, the one place that both sides see."""
    program = f"import os\nout = open({str(sandbox.folder / 'said')!r}, 'w')\n{source}"
    sandbox.run([sys.executable, "-P", "-c", program])
    found = sandbox.folder / "said"
    return found.read_text() if found.exists() else ""


@pytest.mark.sandbox
def test_code_finds_the_submission_and_the_course_and_nothing_else_and_writes_little_and_nowhere_else(
    submission, monkeypatch
):
    monkeypatch.setenv("TOKEN", "secret-of-the-instructor")
    places = [ROOT / "solutions", ROOT / "grading", Path.home() / ".bashrc", submission]
    with Sandbox(submission, limits=TIGHT) as sandbox:
        told = said(
            sandbox,
            "import socket, sys; sys.path.insert(0, '/scratch'); from lab9_x.answer import ANSWER\n"
            "import utils\n"
            f"hidden = [os.path.exists(p) for p in ({', '.join(map(repr, map(str, places)))}, '/course/grading', "
            "'/course/solutions')]\n"
            "print(ANSWER, utils.__file__, any(hidden), os.environ['MLF_DEVICE'], file=out)\n"
            "print(os.environ.get('TOKEN'), 'secret' in open('/proc/1/environ').read(), file=out)\n"
            "server = socket.create_server(('127.0.0.1', 0)); socket.create_connection(server.getsockname())\n"
            "print(sorted(name for _, name in socket.if_nameindex()), file=out)\n"
            "refused = []\n"
            "for place in ('/', '/usr', '/course', '/course/utils', '/dev', '/etc', '/submission/lab9_x'):\n"
            "    try: open(place + '/x', 'w')\n"
            "    except OSError: refused.append(place)\n"
            "for place in ('/scratch/run', '/tmp', '/dev/shm'):\n"
            "    try:\n"
            "        for n in range(4): open(f'{place}/{n}', 'wb').write(bytes(5 << 20))\n"
            "    except OSError as error: refused.append(place)\n"
            "print(len(refused), file=out)",
        )
    assert told.splitlines() == ["42 /course/utils/__init__.py False cpu", "None False", "['lo']", "10"]
    assert (submission / "lab9_x" / "answer.py").read_text() == "ANSWER = 42\n"


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = bytearray(400 << 20)\nwhile True: pass", "more than 300 MiB of memory"),
        ("import time\nwhile os.fork(): pass\ntime.sleep(60)", "more than"),
        (
            "for n in range(9): open(f'{os.path.dirname(out.name)}/{n}', 'wb').write(bytes(4 << 20))\nwhile 1: pass",
            "wrote",
        ),
        ("while True: pass", "longer than 1 seconds"),
    ],
    ids=["memory", "processes", "disk", "time"],
)
def test_what_breaks_a_limit_is_ended_with_the_reason(submission, source, reason):
    limits = replace(TIGHT, seconds=1) if "longer" in reason else TIGHT
    with Sandbox(submission, limits=limits) as sandbox:
        said(sandbox, source)
        assert reason in sandbox.killed


def running(name: str) -> list[int]:
    """Processes whose command line holds ``name``."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if name in " ".join(p.info["cmdline"] or ())]


@pytest.mark.sandbox
def test_nothing_is_left_running_and_no_folder_is_left(submission):
    with Sandbox(submission) as sandbox:
        said(sandbox, "import time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)")
        name = sandbox.folder.name
        until = time.monotonic() + 10  # the kernel takes a moment to end what was killed
        while running(name) and time.monotonic() < until:
            time.sleep(0.05)
        assert not running(name)
    assert not sandbox.folder.exists()


@pytest.mark.sandbox
def test_a_sandbox_dies_with_the_process_that_made_it(submission):
    program = (
        "import sys; from pathlib import Path; from grading.sandbox import Sandbox\n"
        f"s = Sandbox(Path({str(submission)!r})); print(s.folder.name, flush=True); s.run(['sleep', '{SLEEP}'])"
    )
    outer = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    name = outer.stdout.readline().strip()

    def inside() -> list[str]:
        found = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
        return [line for line in found if name in line or line == f"sleep {SLEEP}"]

    waited = time.monotonic() + 20
    while f"sleep {SLEEP}" not in inside() and time.monotonic() < waited:
        pass
    outer.kill()
    outer.wait()
    while inside() and time.monotonic() < waited:
        pass
    assert not inside()
    module.remove_leftovers()
    assert not list(Path(module.RUNTIME).glob(name))


@pytest.mark.parametrize("maker", ["has ended", "is a zombie", "has its number used by a later process"])
def test_what_a_killed_grader_left_is_ended_by_the_next_one(maker, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RUNTIME", str(tmp_path))  # a place where no other grader tidies up meanwhile
    dead = subprocess.Popen(["true"])
    if maker == "has ended":
        dead.wait()
    pid = os.getpid() if maker.startswith("has its number") else dead.pid
    folder = Path(module.RUNTIME) / f"mlf-{pid}-left"
    folder.mkdir()
    if pid != dead.pid:
        os.utime(folder, (psutil.Process().create_time() - 100,) * 2)
    code = "import time; print('runs', flush=True); time.sleep(60)"
    left = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    left.stdout.readline()  # a process has no command line to be found by until it runs
    while maker == "is a zombie" and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    module.remove_leftovers()
    assert left.wait(timeout=10) == -9
    assert not folder.exists()
    dead.wait()


def test_what_a_grader_works_in_is_left_alone_by_another():
    folder = Path(module.RUNTIME) / f"mlf-{os.getpid()}-kept"
    folder.mkdir()
    try:
        module.remove_leftovers()
        assert folder.exists()
    finally:
        folder.rmdir()


def test_a_sandbox_that_goes_while_leftovers_are_looked_for_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RUNTIME", str(tmp_path))
    (tmp_path / "mlf-1-gone").symlink_to("nowhere")  # listed, and not there any more when it is looked at
    module.remove_leftovers()


def test_a_machine_without_bubblewrap_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    module.available.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match="apt install bubblewrap"):
            module.require()
    finally:
        module.available.cache_clear()


def test_forbidden_user_namespaces_are_named_as_the_reason(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(module.shutil, "which", lambda name: str(program))
    module.available.cache_clear()
    try:
        assert "No permissions to create new namespace" in module.available()
        assert "unprivileged_userns_clone" in module.available()
    finally:
        module.available.cache_clear()


def test_without_a_sandbox_the_code_still_runs_on_a_copy_and_is_ended(submission):
    with Sandbox(submission, isolated=False, limits=replace(TIGHT, seconds=1)) as sandbox:
        told = said(sandbox, "print(os.getcwd().endswith('work/run'), file=out, flush=True)\nwhile True: pass")
        assert told == "True\n"
        assert "longer than 1 seconds" in sandbox.killed


def test_what_a_worker_waits_for_ends_with_it_from_its_first_moment_on(tmp_path):
    (tmp_path / "slow.py").write_text("import sys, time\nprint(sys.argv[1:], flush=True)\ntime.sleep(60)\n")
    program = (
        "import os, subprocess, sys\n"
        "child = [sys.executable, '-m', 'grading.with_parent', str(os.getpid()), 'slow', '--seed', '3']\n"
        "started = subprocess.Popen(child)\nprint(started.pid, flush=True)\nstarted.wait()\n"
    )
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    outer = subprocess.Popen([sys.executable, "-c", program], env=paths, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(outer.stdout.readline()))
    assert outer.stdout.readline() == "['--seed', '3']\n"
    outer.kill()
    outer.wait()
    child.wait(timeout=10)
    late = [sys.executable, "-m", "grading.with_parent", str(outer.pid), "slow"]  # its parent has ended before
    assert subprocess.run(late, env=paths, timeout=10).returncode == 1
