"""Recorded measurements: those of the course are whole and current, damaged ones are refused by file and value."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import benchmark_cli, truth
from utils import record_schemas, records, runtime

COPY = {"bytes": 64, "seconds": 1e-6, "low": 9e-7, "high": 2e-6, "rounds": 5, "bytes_per_second": 1.28e8}
RESULTS = {
    "copy": [COPY, {**COPY, "bytes": 128}],
    "matmul": [
        {"dtype": "bf16", "n": 8, "seconds": 1e-6, "low": 1e-6, "high": 1e-6, "rounds": 5, "flops_per_second": 1e9}
    ],
    "unavailable": {},
    "launch": {"seconds": 1e-6, "low": 1e-6, "high": 1e-6, "rounds": 5},
    "best": {"copy_bytes_per_second": 1.28e8, "matmul_flops_per_second": {"bf16": 1e9}},
}
SOURCES, SCHEMA = benchmark_cli.sources("ceilings"), benchmark_cli.schema("ceilings")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """An empty folder of records on a machine that says it has a GPU."""
    monkeypatch.setattr(records, "DIRECTORY", tmp_path)
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    return tmp_path


def edit(path, change, *, renew_digest=False):
    raw = json.loads(path.read_text())
    change(raw)
    if renew_digest:
        raw["digest"] = records.digest(raw)
    path.write_text(json.dumps(raw))


# ---- the records of the course ---------------------------------------------------------------------------------------


def test_every_benchmark_is_recorded_with_what_ran():
    assert records.benchmark_names() == benchmark_cli.benchmark_names()
    for name in records.benchmark_names():
        record = records.load(name)
        assert benchmark_cli.problems(name, record.results) == []
        assert record.label == f"{record.device}, {record.date}"
        assert record.command == f"python -m benchmarks.{name}"
        assert {"python", "torch", "triton", "cuda", "driver", "numpy"} <= set(record.versions)


def test_each_record_is_of_what_its_benchmark_measures():
    for name in records.benchmark_names():
        assert records.load(name).sources == tuple(benchmark_cli.sources(name)), name


def test_no_measured_source_has_changed_since_it_was_measured():
    assert records.stale() == []


def test_the_files_are_written_as_the_code_writes_them():
    for name in records.benchmark_names():
        text = records.path_of(name).read_text(encoding="utf-8")
        assert records.as_text(json.loads(text)) == text


def test_measured_rates_stay_below_the_hardware_and_near_what_is_known():
    best = records.load("ceilings").results["best"]
    assert 2.8e12 < best["copy_bytes_per_second"] < 3.35e12
    assert 650e12 < best["matmul_flops_per_second"]["bf16"] < 989e12
    for point in records.load("matmul_sweep").results["cublas"]:
        assert point["flops_per_second"] < 989e12


# ---- the profiler's truth --------------------------------------------------------------------------------------------


def test_at_least_ten_kernels_are_compared_and_every_deviation_is_explained():
    results = records.load("profiler_truth").results
    assert len({row.kernel for row in truth.comparison(results)}) >= 10
    assert truth.unexplained(results) == []


def test_what_l2_sends_to_the_multiprocessors_is_what_the_profiler_counts_for_every_kernel():
    rows = [row for row in truth.comparison(records.load("profiler_truth").results) if row.what == "into L1"]
    assert len(rows) >= 10
    assert [row.kernel for row in rows if not row.equal] == []


def kernel(counted=(), **measured):
    counts = dict.fromkeys(
        ("sectors_loaded", "sectors_stored", "sectors_atomic", "l2_sectors_loaded", "l2_sectors_stored",
         "dram_sectors_loaded", "dram_sectors_stored"), 0,
    )  # fmt: skip
    return {
        "name": "k",
        "size": "8",
        "counted": {**counts, **dict(counted)},
        "measured": {f"{k}.sum": v for k, v in measured.items()},
    }


LD = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld"


def test_equal_counts_need_no_explanation():
    (row,) = truth.rows(kernel({"sectors_loaded": 1000}, **{LD: 1004}))
    assert row.equal and row.explanation == "" and row.ratio_text == "1.004"


def test_repeats_that_l1_answered_are_told_from_loads_that_nobody_counted():
    requests = "l1tex__t_requests_pipe_lsu_mem_global_op_ld"
    (row,) = truth.rows(kernel({"sectors_loaded": 100}, **{LD: 400, f"{LD}_lookup_hit": 300, requests: 25}))
    assert row.explanation.startswith("L1 hits") and "16.0 sectors a request" in row.explanation
    (row,) = truth.rows(kernel({"sectors_loaded": 100}, **{LD: 400, f"{LD}_lookup_hit": 200, requests: 25}))
    assert row.explanation == ""


def test_loads_by_the_copy_engine_are_recognised_by_its_own_counter():
    tma = "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld"
    (row,) = truth.rows(kernel({"sectors_loaded": 500}, **{tma: 500}))
    assert row.measured == 0 and row.explanation.startswith("TMA")
    (row,) = truth.rows(kernel({"sectors_loaded": 500}, **{tma: 100}))
    assert row.explanation == ""


def test_a_deviation_that_no_rule_knows_is_listed_as_unexplained():
    odd = kernel({"dram_sectors_loaded": 100_000}, dram__sectors_read=130_000)
    assert [row.what for row in truth.unexplained({"kernels": [odd]})] == ["DRAM reads"]


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_again(shelf):
    path = records.save("ceilings", RESULTS, SCHEMA, SOURCES, "python -m benchmarks.ceilings")
    record = records.load("ceilings")
    assert record.results == RESULTS and record.sources == tuple(SOURCES)
    assert record.fingerprint == records.fingerprint(SOURCES)
    assert re.fullmatch(r"NVIDIA H100 80GB HBM3, \d{4}-\d\d-\d\d", record.label)
    assert records.benchmark_names() == ["ceilings"] and records.stale() == []
    assert [file.name for file in shelf.iterdir()] == [path.name]


def test_a_benchmarks_command_line_records_what_has_its_schema_and_refuses_the_rest(shelf):
    assert benchmark_cli.run("ceilings", lambda quick: RESULTS, lambda results: "table", SCHEMA, []) == 0
    record = records.load("ceilings")
    assert (record.results, record.sources) == (RESULTS, tuple(SOURCES))
    with pytest.raises(records.RecordError, match=r"ceilings\.json: results\.best is missing"):
        broken = {key: RESULTS[key] for key in RESULTS if key != "best"}
        benchmark_cli.run("ceilings", lambda quick: broken, lambda results: "table", SCHEMA, [])
    assert records.load("ceilings").results == RESULTS


def test_nothing_is_recorded_on_a_machine_without_a_gpu(shelf, monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="cannot record 'ceilings': no GPU is in use"):
        records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command")
    assert records.benchmark_names() == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {**RESULTS, "copy": [{**COPY, "seconds": float("nan")}]},
            r"results\.copy\[0\]\.seconds must be finite, got nan",
        ),
        ({**RESULTS, "copy": [{**COPY, "high": float("inf")}]}, r"results\.copy\[0\]\.high must be finite, got inf"),
        ({**RESULTS, "copy": []}, r"results\.copy must be a list of at least one item"),
        (
            {**RESULTS, "copy": [{**COPY, "bytes": -4}]},
            r"copy\[0\]\.bytes must be a whole number of at least 1, got -4",
        ),
        (
            {**RESULTS, "copy": [{**COPY, "rounds": 2.5}]},
            r"copy\[0\]\.rounds must be a whole number of at least 1, got 2\.5",
        ),
        ({**RESULTS, "copy": [{**COPY, "low": 0}]}, r"copy\[0\]\.low must be a positive finite number, got 0"),
        ({**RESULTS, "copy": [{**COPY, "low": "1"}]}, r"copy\[0\]\.low must be a positive finite number, got '1'"),
        ({**RESULTS, "extra": 1}, r"results\.extra is not in the schema"),
        ({key: RESULTS[key] for key in RESULTS if key != "launch"}, r"results\.launch is missing"),
        ({**RESULTS, "launch": {1: 2}}, "has a key that is not a text: 1"),
        ({**RESULTS, "launch": object()}, "must be plain JSON data"),
    ],
)
def test_a_broken_measurement_is_refused_and_the_former_record_stays(shelf, broken, message):
    path = records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command")
    former = path.read_text()
    with pytest.raises(records.RecordError, match=rf"ceilings\.json: .*{message}"):
        records.save("ceilings", broken, SCHEMA, SOURCES, "command")
    assert path.read_text() == former
    assert [file.name for file in shelf.iterdir()] == ["ceilings.json"]


def test_a_failure_while_writing_leaves_the_former_record_and_no_litter(shelf, monkeypatch):
    path = records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command")
    former = path.read_text()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        records.save("ceilings", {**RESULTS, "unavailable": {"fp8": "no"}}, SCHEMA, SOURCES, "another command")
    assert path.read_text() == former
    assert [file.name for file in shelf.iterdir()] == ["ceilings.json"]


def test_a_benchmark_or_source_that_is_none_is_refused_by_name(shelf):
    with pytest.raises(ValueError, match=r"got '\.\./evil'"):
        records.save("../evil", {}, {}, SOURCES, "command")
    with pytest.raises(FileNotFoundError, match=r"benchmarks/gone\.py"):
        records.save("ceilings", RESULTS, SCHEMA, ["benchmarks/gone.py"], "command")
    with pytest.raises(ValueError, match=r"nothing is recorded for 'latency'; there are records of: nothing"):
        records.load("latency")


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_changed_source_makes_its_record_stale_and_says_what_to_run(shelf, monkeypatch):
    records.save("ceilings", RESULTS, SCHEMA, SOURCES, "python -m benchmarks.ceilings")
    monkeypatch.setattr(records, "fingerprint", lambda *sources: "0" * 64)
    (problem,) = records.stale()
    assert problem.startswith("ceilings: benchmarks/ceilings.py changed since it was measured")
    assert "run `python -m benchmarks.ceilings` on a GPU" in problem


def test_a_source_that_is_gone_makes_its_record_stale(shelf):
    path = records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command")
    edit(path, lambda raw: raw.update(sources=["benchmarks/gone.py"]))
    assert records.stale() == ["ceilings: measured source 'benchmarks/gone.py' is not there any more"]


def test_a_source_may_be_renamed_in_a_record_if_it_is_the_same_source(shelf):
    path = records.save("ceilings", RESULTS, SCHEMA, ["utils/records.py"], "command")
    edit(path, lambda raw: raw.update(sources=["utils/records.py", "utils/records.py::load"]))
    assert records.stale() == []
    edit(path, lambda raw: raw.update(sources=["benchmarks/latency.py"]))
    (problem,) = records.stale()
    assert problem.startswith("ceilings: benchmarks/latency.py changed since it was measured")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("device"), "key 'device' is missing"),
        (lambda raw: raw.update(device=""), "device must be a text that is not empty, got ''"),
        (lambda raw: raw.update(date="20.11.2026"), r"date must be a day such as 2026-11-20, got '20\.11\.2026'"),
        (lambda raw: raw.update(date=None), "date must be a day such as 2026-11-20, got None"),
        (lambda raw: raw.update(format=7), "format must be 1, got 7"),
        (lambda raw: raw.update(format=True), "format must be 1, got True"),
        (lambda raw: raw.update(versions={}), r"versions must map names to texts, got \{\}"),
        (
            lambda raw: raw.update(benchmark="latency"),
            "benchmark must be 'ceilings', as the file's name says, got 'latency'",
        ),
        (lambda raw: raw.update(fingerprint="abc"), "fingerprint must be 64 hexadecimal digits, got 'abc'"),
        (lambda raw: raw.update(sources=[]), r"sources must be a list of at least one path, got \[\]"),
        (lambda raw: raw.update(versions={"torch": 2}), "versions must map names to texts"),
        (lambda raw: raw.update(note="hi"), "key 'note' is not part of a record"),
        (lambda raw: raw["results"]["copy"][1].pop("bytes"), "the file was edited after it was measured"),
        (lambda raw: raw["results"]["copy"][1].update(seconds=2e-6), "the file was edited after it was measured"),
    ],
)
def test_a_damaged_record_is_refused_by_file_and_value(shelf, change, message):
    edit(records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command"), change)
    with pytest.raises(records.RecordError, match=rf"^ceilings\.json: .*{message}"):
        records.load("ceilings")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda raw: raw.update(device="NVIDIA A100-SXM4-80GB"), "device 'NVIDIA A100-SXM4-80GB'"),
        (lambda raw: raw.update(date="2031-02-03"), "date '2031-02-03'"),
        (lambda raw: raw["versions"].update(torch="9.9.9"), "'torch': '9.9.9'"),
        (lambda raw: raw.update(command="python -m something.else"), "command 'python -m something.else'"),
        (lambda raw: raw.update(fingerprint="0" * 64), f"fingerprint '{'0' * 64}'"),
        (lambda raw: raw.update(digest="0" * 64), "the results do not match"),
    ],
)
def test_whatever_was_edited_in_a_record_is_refused_by_file_and_value(shelf, change, value):
    edit(records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command"), change)
    with pytest.raises(records.RecordError, match=rf"^ceilings\.json: the file was edited after .*{value}.* digest "):
        records.load("ceilings")


def test_the_order_and_layout_of_a_record_may_change(shelf):
    path = records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command")
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(raw.items())), indent=7))
    assert records.load("ceilings").results == RESULTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"format": 1', "not valid JSON"),
        ('{"format": NaN}', "NaN is not a number that can have been measured"),
        ("[" * 100_000, "not valid JSON"),
        ('{"format": 1, "format": 2}', "key 'format' appears twice"),
        ("[]", "must be an object with the keys format, benchmark"),
    ],
)
def test_a_file_that_is_no_record_is_refused_by_name(shelf, text, message):
    (shelf / "ceilings.json").write_text(text)
    with pytest.raises(records.RecordError, match=rf"^ceilings\.json: .*{message}"):
        records.load("ceilings")


def test_a_file_that_is_no_text_is_refused_by_name(shelf):
    (shelf / "ceilings.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(records.RecordError, match=r"^ceilings\.json: not a text file in UTF-8"):
        records.load("ceilings")


def test_several_problems_are_counted(shelf):
    path = records.save("ceilings", RESULTS, SCHEMA, SOURCES, "command")
    edit(path, lambda raw: raw.update(device="", command=""))
    with pytest.raises(records.RecordError, match=r"device must be .* \(and 1 more\)"):
        records.load("ceilings")


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_a_schema_names_the_place_of_each_difference():
    schema = {"a": [{"n": record_schemas.SIZE}], "b": {str: str}, "c": bool}
    assert record_schemas.check({"a": [{"n": 1}], "b": {}, "c": True}, schema, "r") == []
    value = {"a": [{"n": 1}, {"n": True}], "b": {"x": ""}, "c": 1, "d": 0}
    assert record_schemas.check(value, schema, "r") == [
        "r.d is not in the schema",
        "r.a[1].n must be a whole number of at least 1, got True",
        "r.b.x must be a text that is not empty, got ''",
        "r.c must be true or false, got 1",
    ]
    assert record_schemas.check([1], {"a": str}, "r") == ["r must be an object, got [1]"]
