"""Where kernels run is decided once, before Triton; the report says what works and what to do about what does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils import environment, runtime
from utils.environment import Device, Facts, Line

pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[1]
T4 = ("Tesla T4", (7, 5))
H100 = ("NVIDIA H100 80GB HBM3", (9, 0))
PATCHED = ("bfloat16 dot", "loop bounds")


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MLF_DEVICE")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**env, **environ}, capture_output=True, text=True
    )


def line(facts: Facts, start: str) -> Line:
    """The one line of the report that starts with ``start``."""
    (found,) = [line for line in runtime.report(facts) if line.text.startswith(start)]
    return found


# ---- the decision ----


def test_a_recent_gpu_is_used():
    assert runtime.decide([H100]).gpu_index == 0


def test_a_t4_is_passed_over_for_the_interpreter():
    decision = runtime.decide([T4])
    assert decision.gpu_index is None
    assert decision.reason == ("Tesla T4 has compute capability 7.5, and Triton no longer supports GPUs before 8.0")


def test_the_first_gpu_that_triton_supports_is_used():
    assert runtime.decide([T4, H100]).gpu_index == 1


def test_without_a_gpu_kernels_are_interpreted():
    assert runtime.decide([]) == runtime.Decision(None, "PyTorch sees no CUDA GPU")


@pytest.mark.parametrize(("setting", "interpret"), [("cpu", ""), (" CPU ", ""), ("", "1")])
def test_the_interpreter_can_be_asked_for_on_a_machine_with_a_gpu(setting, interpret):
    assert runtime.decide([H100], setting, interpret).gpu_index is None


def test_cuda_can_be_insisted_on():
    assert runtime.decide([H100], "cuda", "1").gpu_index == 0
    with pytest.raises(RuntimeError, match=r"MLF_DEVICE=cuda needs .* found: Tesla T4 \(7.5\)"):
        runtime.decide([T4], "cuda")
    with pytest.raises(RuntimeError, match="found: none"):
        runtime.decide([], "cuda")


def test_an_unknown_setting_is_refused_by_value():
    with pytest.raises(ValueError, match="MLF_DEVICE must be cpu, cuda, auto or unset, got 'tpu'"):
        runtime.decide([], "tpu")


def test_what_was_decided_fits_together():
    assert (not runtime.HAS_GPU) == runtime.INTERPRET
    assert runtime.DEVICE.type == ("cuda" if runtime.HAS_GPU else "cpu")
    assert runtime.pick(cpu="small", gpu="large") == ("large" if runtime.HAS_GPU else "small")
    assert (runtime.gpu_name() is None) == runtime.INTERPRET
    assert torch.zeros(1, device=runtime.DEVICE).device == runtime.DEVICE


@pytest.mark.slow
def test_importing_the_runtime_does_not_import_triton_and_makes_it_interpret():
    done = python(
        "from utils import runtime\nimport os, sys\nassert 'triton' not in sys.modules\nimport triton\n"
        "assert os.environ['TRITON_INTERPRET'] == '1'\n"
        "assert not isinstance(triton.language.cdiv, triton.JITFunction)\n"
        "from utils import interpreter\nassert 'bfloat16 dot' in interpreter.patches()\n",
        MLF_DEVICE="cpu",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_triton_imported_too_early_is_told_with_what_to_do():
    done = python("import triton\nfrom utils import runtime", MLF_DEVICE="cpu")
    assert done.returncode == 1
    assert "RuntimeError: Triton was imported before utils.runtime and uses its compiler" in done.stderr
    assert "restart the kernel" in done.stderr and "import utils.runtime before triton" in done.stderr


@pytest.mark.slow
def test_triton_imported_early_as_interpreter_is_repaired_all_the_same():
    code = "import triton\nfrom utils import runtime, interpreter\nassert interpreter.patches()"
    done = python(code, MLF_DEVICE="cpu", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


# ---- the report ----


@pytest.mark.slow
def test_the_command_prints_a_line_each_and_succeeds_where_the_course_runs():
    done = subprocess.run([sys.executable, "-m", "utils.runtime"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("[ok] Making LLMs Fast")
    assert all(text.startswith(("[ok]", "[warn]", "       -> ")) for text in lines[:-1])
    assert lines[-1].startswith("The course runs here")


def test_a_laptop_without_a_gpu_is_all_ok():
    lines = runtime.report(Facts(patches=PATCHED, memory=16 * 2**30, course="0.1.0"))
    assert {line.level for line in lines} == {"ok"}
    assert environment.as_text(lines).endswith("The course runs here.")


def test_a_t4_is_told_that_kernels_run_in_the_interpreter_and_why():
    decision = runtime.decide([T4])
    facts = Facts(devices=(Device(*T4, 15 * 2**30),), reason=decision.reason, patches=PATCHED, torch_cuda="12.6")
    found = line(facts, "kernels run in Triton's interpreter")
    assert found.level == "warn"
    assert "Triton no longer supports GPUs before 8.0" in found.text
    assert "Tesla T4, compute capability 7.5, 15 GiB is too old for Triton" in found.advice
    assert "Every notebook and lab works" in found.advice


def test_a_gpu_in_use_is_named_with_its_capability_and_memory():
    facts = Facts(devices=(Device(*T4), Device(*H100, 80 * 2**30)), has_gpu=True, torch_cuda="13.0")
    text = line(facts, "kernels run on the GPU").text
    assert text == "kernels run on the GPU: NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB (and 1 more)"
    assert line(facts, "interpreter repaired when the profiler uses it").level == "ok"


@pytest.mark.parametrize(("system", "way"), [("macOS", "dev container"), ("Windows", "WSL")])
def test_a_system_without_triton_packages_is_told_where_to_go(system, way):
    facts = Facts(system=system, machine="arm64", triton=None)
    assert line(facts, system).level == "fail" and way in line(facts, system).advice
    assert line(facts, "Triton is not installed").level == "fail"
    assert environment.as_text(runtime.report(facts)).endswith(
        "2 things must be put right before the course runs here."
    )


REPORTED = [
    (Facts(triton=None), "Triton is not installed", "fail", ["pip install 'triton>=3.6'"]),
    *(
        (Facts(triton=version), f"Triton {version}", level, [])
        for level, versions in {"fail": ["3.5.1"], "ok": ["3.6.0", "3.7.1", "3.9.0"], "warn": ["3.10.0"]}.items()
        for version in versions
    ),
    *(
        (Facts(python=(3, *version)), "Python 3", level, [])
        for version, level in (((10, 4), "fail"), ((11, 0), "ok"), ((14, 9), "ok"), ((15, 0), "warn"))
    ),
    (Facts(torch=None), "PyTorch is not installed", "fail", []),
    (Facts(torch="2.8.0+cpu"), "PyTorch 2.8.0+cpu", "warn", ["older than the course allows"]),
    (Facts(torch="2.12.1+cpu"), "PyTorch 2.12.1+cpu", "ok", ["not tested", "tested 2.11 and 2.13"]),
    (Facts(torch="2.16.0+cpu"), "PyTorch 2.16.0+cpu", "warn", ["newer", "2.11, 2.13, 2.15", "expect lectures"]),
    (Facts(triton="3.8.0"), "Triton 3.8.0", "ok", ["not tested; expected to work as the tested 3.7 and 3.9 do"]),
    (Facts(triton="3.9.1", devices=(Device(*H100),)), "Triton 3.9.1: everything works", "ok", ["3.6 or 3.7"]),
    (Facts(triton="3.10.0"), "Triton 3.10.0", "warn", ["lab 7", "pip install 'triton>=3.6,<3.10'"]),
    (Facts(nvidia_driver=True), "PyTorch 2.13.0, CPU build, but this machine has an NVIDIA", "warn", ["CUDA build"]),
    (Facts(torch="2.13.0+rocm7.1", patches=PATCHED), "PyTorch 2.13.0+rocm7.1, built for ROCm", "warn", ["NVIDIA"]),
    (Facts(triton="3.6.0", numpy="2.5.0"), "NumPy 2.5.0 with Triton 3.6", "warn", []),
    (Facts(triton="3.6.0", numpy="2.5.0", patches=PATCHED), "NumPy 2.5.0 with Triton 3.6", "ok", ["course patches it"]),
    (Facts(triton="3.7.1", numpy="2.5.0"), "NumPy 2.5.0", "ok", []),
    (Facts(numpy=None), "NumPy is not installed", "fail", []),
    (Facts(), "the interpreter's patches are not in place", "fail", []),
    (
        Facts(patch_error="AttributeError: no such thing"), "the interpreter's patches are not in place", "fail",
        ["AttributeError: no such thing", "triton>=3.6"],
    ),
    (Facts(nvcc="13.0"), "nvcc 13.0", "ok", []),
    (Facts(), "nvcc not found", "ok", []),
    (Facts(memory=2 * 2**30), "2 GiB of memory", "warn", ["4 GiB"]),
    (
        Facts(nvidia_driver=True, torch_cuda="13.0", patches=PATCHED), "kernels run in Triton's interpreter", "warn",
        ["nvidia-smi", "CUDA_VISIBLE_DEVICES", "CUDA 13.0"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "start", "level", "words"), REPORTED, ids=[start for _, start, *_ in REPORTED])
def test_each_fact_is_judged_and_told_with_what_to_do(facts, start, level, words):
    found = line(facts, start)
    assert found.level == level
    assert all(word in f"{found.text} {found.advice}" for word in words)


def test_a_line_reads_like_the_report():
    assert str(Line("warn", "text", "advice")) == "[warn] text\n       -> advice"


def test_the_facts_of_this_machine_are_found():
    facts = environment.gather()
    assert facts.python == sys.version_info[:3]
    assert facts.torch == torch.__version__
    assert facts.cpus >= 1 and facts.triton is not None
    assert bool(facts.patches) == runtime.INTERPRET
    assert facts.memory is None or facts.memory > 2**28


def test_a_failed_report_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(environment, "gather", lambda: Facts(triton=None))
    assert runtime.main() == 1
    assert "[fail] Triton is not installed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("nonsense", "[fail] MLF_DEVICE must be cpu, cuda, auto or unset, got 'nonsense'"),
        pytest.param(
            "cuda",
            "[fail] MLF_DEVICE=cuda needs a CUDA GPU of compute capability 8.0 or newer, found: none "
            "(unset MLF_DEVICE to run kernels in the interpreter)",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to use"),
        ),
    ],
)
def test_the_command_answers_an_impossible_setting_in_words(setting, said):
    done = python("import runpy; runpy.run_module('utils.runtime', run_name='__main__')", MLF_DEVICE=setting)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (1, said, "")


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [("torch", "PyTorch"), ("triton", "Triton"), ("numpy", "NumPy")])
def test_the_command_reports_a_missing_package_in_words(package, name):
    hide = (
        "import importlib.metadata, importlib.abc, runpy, sys\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, fullname, path=None, target=None):\n"
        f"        if fullname.split('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {fullname!r}', name=fullname)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "version = importlib.metadata.version\n"
        "def without(wanted):\n"
        f"    if wanted == {package!r}:\n"
        "        raise importlib.metadata.PackageNotFoundError(wanted)\n"
        "    return version(wanted)\n"
        "importlib.metadata.version = without\n"
        "runpy.run_module('utils.runtime', run_name='__main__')\n"
    )
    done = python(hide, MLF_DEVICE="cpu")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"[fail] {name} is not installed" in done.stdout
    assert f"[warn] no kernel runs here yet: {name} must be installed first" in done.stdout
    assert "1 thing must be put right" in done.stdout


def test_the_versions_of_this_environment_are_said_to_be_tested_only_where_they_are():
    installed = {"Triton": (environment.TESTED_TRITON, environment.gather().triton)}
    installed["PyTorch"] = environment.TESTED_TORCH, torch.__version__
    for name, (tested, version) in installed.items():
        is_tested = environment.version_tuple(version)[:2] in tested
        assert (environment.expectation(version, tested) == ("ok", "")) == is_tested, name
        assert list(tested) == sorted(tested)


def test_the_tested_versions_are_the_pins_and_those_that_ci_runs():
    pins = re.findall(r"^(torch|triton)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    run = {*pins, *re.findall(r'(torch|triton): "([\d.]+)"', workflow)}
    for name, tested in (("torch", environment.TESTED_TORCH), ("triton", environment.TESTED_TRITON)):
        assert {environment.version_tuple(version)[:2] for each, version in run if each == name} == set(tested)
