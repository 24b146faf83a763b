"""An entry of the leaderboard is found, and what is wrong with it is told."""

from __future__ import annotations

import pytest
import torch
from attention_entries import SMALL

from benchmarks import attention_entry
from benchmarks.attention_entry import EntryError


def check(path, backward=True, dtype=torch.bfloat16):
    return attention_entry.check(attention_entry.load(str(path)), [dtype], [16], backward)


# ---- finding an entry ------------------------------------------------------------------------------------------------


def test_a_module_and_a_file_are_found_with_their_functions_and_a_digest(entry_file):
    module = attention_entry.load("solutions.lab3_flash_attention")
    entry = attention_entry.load(str(entry_file()))
    assert callable(module.attention) and callable(module.with_lse) and callable(entry.attention)
    assert len(module.sha256) == len(entry.sha256) == 64 and module.sha256 != entry.sha256
    assert attention_entry.load(str(entry_file(more="\n# a remark\n"))).sha256 != entry.sha256


def test_a_file_may_import_what_lies_beside_it(entry_file, tmp_path):
    (tmp_path / "beside_the_entry.py").write_text("FACTOR = 1.0\n")
    assert attention_entry.load(str(entry_file(more="\nfrom beside_the_entry import FACTOR\n"))).with_lse is not None


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such.py", "there is no file no_such.py"),
        ("no.such.module", "there is no module no.such.module"),
        ("benchmarks.no_such", "there is no module benchmarks.no_such"),
        ("not a name", "is neither a module's name"),
        ("math", r"must have a function flash_attention\(q, k, v, causal=False, scale=None\), and has none"),
    ],
)
def test_a_target_that_is_none_is_named(target, said):
    with pytest.raises(EntryError, match=said):
        attention_entry.load(target)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("\n1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero"),
        ("\nimport no_such_thing\n", "cannot be imported: No module named 'no_such_thing'"),
        ("\nfrom . import something\n", "relative import.*give it as a module"),
        ("\nraise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
        ("\nflash_attention = 3\n", "and has 3 of that name"),
        ("\nflash_attention_with_lse = 3\n", "flash_attention_with_lse of .* must be a function, got 3"),
        ("\ndef flash_attention(q, k, v): pass\n", r"must take \(q, k, v, causal=False, scale=None\), it takes"),
    ],
)
def test_a_file_that_is_no_entry_says_why(entry_file, more, said):
    with pytest.raises(EntryError, match=said):
        attention_entry.load(str(entry_file(more=more)))


# ---- correctness -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_right_attention_passes_with_its_logsumexp_and_without(entry_file, small_cases):
    assert check(entry_file()) == 2 * len(SMALL)
    alone = "\nwhole = flash_attention_with_lse\ndel flash_attention_with_lse\n"
    assert check(entry_file("return flash_attention_with_lse", "return whole", alone)) == len(SMALL)
    assert check(entry_file(), dtype=torch.float16) == 2 * len(SMALL)


@pytest.mark.slow
def test_the_rule_holds_on_the_cases_themselves(entry_file):
    assert check(entry_file(), backward=False) == 2 * len(attention_entry.CASES)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tril(Nk - Nq)", "tril()", r"Nq=9 Nk=13 .*causal=True.*o: .* elements differ; max abs error .* at o\[b="),
        ("o = torch.softmax", "o = 1.1 * torch.softmax", r"Nq=1 Nk=1 D=16 bfloat16 causal=False: o: .* differ"),
        (".masked_fill(blind, 0.0) @ v", " @ v", r"Nq=11 Nk=5 .* scale=0.3, by token in memory: o: .* differ"),
        ("[:, 0], -math.inf)", "[:, 0], -1e30)", "lse: 18 of 33 elements differ; max abs error inf"),
        ("o.to(q.dtype)", "o", "expected o.dtype bfloat16, got float32"),
        ("o.to(q.dtype)", "o.to(q.dtype).mT", r"expected o.shape \(1, 1, 1, 16\), got \(1, 1, 16, 1\)"),
        ("o.to(q.dtype)", "o.to(q.dtype).detach()", "o of flash_attention has no gradient .--forward-only"),
        ("(x.repeat_interleave", "(x.detach().repeat_interleave", "gives no dk"),
        ("scores = q.float()", "scores = (2 * q - q.detach()).float()", "dq: .* elements differ"),
    ],
)
def test_a_wrong_attention_is_told_where_and_by_how_much(entry_file, small_cases, old, new, said):
    with pytest.raises(EntryError, match=said):
        check(entry_file(old, new))


def test_the_largest_error_is_told_with_its_place_and_nan_is_the_largest():
    right = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    target = attention_entry.tensors.Target(right, 0.01, torch.float16, (1, 2, 3, 4))
    got = right.half()
    got[0, 0, 0, 0], got[0, 1, 2, 3] = 0.5, 2.0
    said = attention_entry.wrong("o", got, target, 0.0, {})
    assert said == (
        "o: 2 of 24 elements differ; max abs error 2 (tolerance 0.01) at o[b=0, h=1, row=2, column=3]: "
        "expected 0, got 2"
    )
    got[0, 1, 0, 1] = float("nan")
    assert "at o[b=0, h=1, row=0, column=1]: expected 0, got NaN" in attention_entry.wrong("o", got, target, 0.0, {})
    assert attention_entry.wrong("o", got, target, 3.0, {}).startswith("o: 1 of 24 elements differ")
    assert attention_entry.wrong("o", right.half(), target, 0.0, {}) is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "must return one tensor, o, got None .is there a return"),
        ("return q, k", "must return one tensor, o, got tuple of 2: Tensor, Tensor"),
        ("return 3.0", "must return one tensor, o, got a float"),
        ("raise ValueError('only\\n48 keys')", "flash_attention raises ValueError: 48 keys"),
        ("return 1 * q.add_(1)", "flash_attention changes its input q"),
        ("return q", "o shares memory with the input q"),
    ],
)
def test_a_result_of_another_kind_is_told(entry_file, small_cases, body, said):
    path = entry_file(more=f"\ndef flash_attention(q, k, v, causal=False, scale=None):\n    {body}\n")
    with pytest.raises(EntryError, match=f"B=1 Hq=1 Hkv=1 Nq=1 Nk=1 D=16 bfloat16 causal=False: .*{said}"):
        check(path, backward=False)
