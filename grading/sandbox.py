"""Runs a student's code where it can do no harm: in bubblewrap, within limits, with nothing left running afterwards.

Inside there is the system and the Python environment (read-only), the course's ``utils`` (read-only, at ``/course``), a
copy of the submission (at ``/scratch``, on a file system of limited size) and one runtime folder that the grader sees
too. There is no network, no home, no ``solutions/``, no gradebook, no seed but those that the code is given. A watcher
ends everything that takes too much memory, too many processes, too much disk or too long, and says which. How much
that is stands in :class:`grading.watcher.Limits`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from grading.lab import ROOT
from grading.watcher import Limits, Watcher, kill_tree

COURSE, WORK, SUBMISSION = "/course", "/scratch", "/submission"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/fonts",
)
SECRET_PACKAGES = ("solutions", "grading", "benchmarks", "tests")  # where a plain `pip install .` would have put them
RUNTIME = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
PREPARE = (  # the shell inside: limits per process, a private copy, then the program itself
    'ulimit -c 0; ulimit -f "$1"; ulimit -d "$2"; ulimit -n 1024; '
    "{ ulimit -u 4096 || ulimit -p 4096; } 2>/dev/null; work=$3; from=$4; shift 4; "
    'cp -R "$from/." "$work/" && mkdir -p "$work/run" "$HOME" && cd "$work/run" && exec nice -n 5 "$@"'
)


class SandboxUnavailable(RuntimeError):
    """Bubblewrap cannot be used here; the text says why, and what to do."""


@cache
def available() -> str | None:
    """Why the sandbox cannot be used on this machine, with what to do about it; None when it can be."""
    program = shutil.which("bwrap")
    if program is None:
        return (
            "bubblewrap (the program bwrap) is not installed: `apt install bubblewrap`, `dnf install bubblewrap`; "
            "it exists for Linux only, so grade on Linux or in the course's container"
        )
    probe = [program, *_isolation(), *_system(), "--remount-ro", "/", "/bin/sh", "-c", "exit 0"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=30, env={}, check=False)
    if tried.returncode == 0:
        return None
    return (
        f"bubblewrap cannot make a sandbox here ({tried.stderr.strip() or f'exit status {tried.returncode}'}): user "
        "namespaces are probably forbidden. Allow them (`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu also "
        "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; a container needs `--privileged` or a seccomp "
        "profile that permits them)"
    )


def require() -> None:
    """Raise :class:`SandboxUnavailable` unless the sandbox works on this machine."""
    reason = available()
    if reason is not None:
        raise SandboxUnavailable(reason)


def remove_leftovers() -> None:
    """End and remove what processes that were killed had no time to: their sandboxes and runtime folders.

    A sandbox dies with the process that made it, but not in the instant between its start and its asking for that.
    """
    for folder in Path(RUNTIME).glob("mlf-*-*"):
        pid = folder.name.split("-")[1]
        if not pid.isdigit() or not _is_ours(folder) or _is_made_by(folder, int(pid)):
            continue
        for process in psutil.process_iter(["cmdline"]):
            if any(str(folder) in word for word in process.info["cmdline"] or ()):
                kill_tree(process.pid)
        shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether ``folder`` is still there and this user's: another grader's sandbox may go while we look at it."""
    try:
        return folder.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _is_made_by(folder: Path, pid: int) -> bool:
    """Whether the process of this number may still work in ``folder``: it has not ended, nor begun long afterwards."""
    try:
        process = psutil.Process(pid)
        # a minute, for the clock that dates files may have been set meanwhile
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < folder.stat().st_mtime + 60
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


class Sandbox:
    """One place to run a student's code in, made for one program (a kernel, or a run of scenarios) and then removed.

    ``folder`` is the runtime folder, visible at the same path inside and outside. ``work`` and ``course`` are the paths
    of the submission's copy and of the course as the code inside sees them.
    """

    def __init__(
        self,
        submission: Path,
        *,
        shown: Mapping[str, Path] | None = None,
        limits: Limits | None = None,
        isolated: bool = True,
    ) -> None:
        """Make the runtime folder; nothing runs yet.

        Args:
            submission: folder that is copied into the sandbox; it holds the lab's package.
            shown: what of the course is visible besides ``utils``: path below the course -> file or folder.
            limits: what the code may use.
            isolated: False runs the code on this machine without bubblewrap (``--no-sandbox``).
        """
        self.submission, self.isolated, self.limits = submission.resolve(), isolated, limits or Limits()
        self.shown = {"utils": ROOT / "utils", **(shown or {})}
        # a socket's path has at most 107 characters, so not below a long TMPDIR
        self.folder = Path(tempfile.mkdtemp(prefix=f"mlf-{os.getpid()}-", dir=RUNTIME))
        self.work, self.course, self.tmp = Path(WORK), Path(COURSE), Path("/tmp")
        if not isolated:
            self.work, self.course, self.tmp = (self.folder / name for name in ("work", "course", "tmp"))
            for path in (self.work, self.course, self.tmp):
                path.mkdir()
            for name, path in self.shown.items():
                (self.course / name).parent.mkdir(parents=True, exist_ok=True)
                (self.course / name).symlink_to(path)
        self._process: subprocess.Popen | None = None
        self._watcher: Watcher | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def killed(self) -> str | None:
        """Why the watcher ended what ran here, in words for the student; None when it did not."""
        return self._watcher.reason if self._watcher else None

    def environment(self) -> dict[str, str]:
        """All that the code inside finds in its environment."""
        tmp = str(self.tmp)
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": f"{tmp}/home",
            "TMPDIR": tmp,
            "USER": "student",
            "LOGNAME": "student",
            "LANG": "C.UTF-8",
            "MLF_DEVICE": "cpu",
            "PYTHONPATH": str(self.course),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            "MPLCONFIGDIR": f"{tmp}/matplotlib",
            "IPYTHONDIR": f"{tmp}/ipython",
            "TRITON_CACHE_DIR": f"{tmp}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{tmp}/inductor",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def command(self, program: Sequence[str]) -> list[str]:
        """The command line that runs ``program`` in here."""
        limits = self.limits
        blocks, kibibytes = limits.file // 512, 16 * limits.memory // 1024
        prepare = ["/bin/sh", "-c", PREPARE, "sh", str(blocks), str(kibibytes), str(self.work)]
        if not self.isolated:
            return [*prepare, str(self.submission), *program]
        binds = [("--ro-bind", str(path), f"{COURSE}/{name}") for name, path in self.shown.items()]
        settings = [("--setenv", name, value) for name, value in self.environment().items()]
        return [
            *(shutil.which("bwrap") or "bwrap", *_isolation(), "--size", str(limits.scratch), "--tmpfs", "/tmp"),
            *("--size", str(limits.scratch), "--tmpfs", "/dev/shm", "--size", str(limits.work), "--tmpfs", WORK),
            *_system(),
            *(word for bind in binds for word in bind),
            *("--ro-bind", str(self.submission), SUBMISSION, "--bind", str(self.folder), str(self.folder)),
            *("--clearenv", *(word for setting in settings for word in setting)),
            *("--remount-ro", "/dev", "--remount-ro", "/", *prepare, SUBMISSION, *program),
        ]

    def spawn(self, program: Sequence[str]) -> subprocess.Popen:
        """Start ``program`` in here, watched; its output goes nowhere. One program at a time."""
        return self.watch(
            subprocess.Popen(
                self.command(program),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.outer_environment(),
                start_new_session=True,
            )
        )

    def outer_environment(self) -> dict[str, str]:
        """The environment of the command itself: bubblewrap's own can be read inside, so it holds nothing."""
        return {} if self.isolated else self.environment()

    def watch(self, process: subprocess.Popen) -> subprocess.Popen:
        """Hold ``process``, started by someone else from :meth:`command`, to the limits from now on."""
        self.kill()
        self._process, self._watcher = process, Watcher(process, self.limits, self.folder)
        self._watcher.start()
        return process

    def run(self, program: Sequence[str]) -> int | None:
        """Run ``program`` to its end; returns its exit status, or None when the watcher ended it."""
        self.spawn(program).wait()
        status, killed = self._process.returncode, self.killed
        self.kill()
        return None if killed else status

    def end(self, reason: str) -> None:
        """End what runs here because it broke a limit that is counted elsewhere."""
        if self._process is not None:
            self._watcher.reason = self._watcher.reason or reason
            kill_tree(self._process.pid)

    def kill(self) -> None:
        """End everything that runs here and wait until it is gone."""
        if self._process is not None:
            self._watcher.stop()
            kill_tree(self._process.pid)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End everything and remove the runtime folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _isolation() -> list[str]:
    words = "--unshare-all --die-with-parent --new-session --unsetenv JPY_PARENT_PID --cap-drop ALL"
    return [
        *words.split(),
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "sandbox",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]


def _system() -> list[str]:
    """Arguments that show the system and the Python environment, read-only, less what would give an answer away."""
    words: list[str] = []
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    for path in (*SYSTEM_FILES, "/sys/devices/system/cpu"):
        words += ["--ro-bind-try", path, path]
    places = {Path(place) for place in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    if any(ROOT.is_relative_to(place) for place in (*places, *map(Path, SYSTEM))):
        words += ["--tmpfs", str(ROOT)]  # the course lies inside what is shown: only what is bound below shows
    for place in sorted(places):
        if not any(place.is_relative_to(folder) for folder in ("/usr", "/bin", "/lib")):
            words += ["--ro-bind", str(place), str(place)]
    for key in ("purelib", "platlib"):
        for package in SECRET_PACKAGES:
            installed = Path(sysconfig.get_paths()[key], package)
            if installed.is_dir():
                words += ["--tmpfs", str(installed)]
    return words
