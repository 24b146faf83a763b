"""FlashAttention's packages as peers of the capstone's, with modules in their place that compute in plain PyTorch."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from attention_entries import plain

from benchmarks import hopper_attention, hopper_causes, hopper_implementations, hopper_peers
from benchmarks.benchmark_cli import problems

SHAPES = [(1, 2, 8, 16, True)]
CASES = ((1, 2, 2, 9, 9), (2, 2, 2, 7, 5))
SHORT = hopper_attention.Effort(1, 0, 0)


def by_token(q, k, v, causal=False):
    """What a package does: q, k, v and o are (batch, seq_len, heads, head_dim)."""
    assert q.shape[2] == 2 and q.stride(3) == 1, "the heads come third, and nothing is copied for it"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q.float() @ k.float().mT / q.shape[3] ** 0.5
    sees = torch.ones_like(scores, dtype=torch.bool)
    sees = sees.tril(k.shape[2] - q.shape[2]) if causal else sees
    blind = ~sees.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~sees, float("-inf")).masked_fill(blind, 0.0), -1)
    return (weights.masked_fill(blind, 0.0) @ v.float()).to(q.dtype).transpose(1, 2)


@pytest.fixture
def install(monkeypatch):
    """Put functions in the packages' places; without one, a package is not installed."""
    everybody = dict.fromkeys(hopper_implementations.functions(), plain)
    monkeypatch.setattr(hopper_implementations, "functions", lambda: everybody)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))

    def put(**functions):
        for name, (_, module) in hopper_peers.PACKAGES.items():
            fake = ModuleType(module)
            fake.flash_attn_func = functions.get(name)
            monkeypatch.setitem(sys.modules, module, fake if name in functions else None)

    return put


def measure():
    return hopper_peers.measure(shapes=SHAPES, cases=CASES, effort=SHORT, workers=0)


@pytest.mark.slow
def test_what_is_installed_is_held_against_float64_and_timed_beside_the_others(install, known_times):
    install(fa3=by_token, fa4=lambda *qkv, causal: (by_token(*qkv, causal=causal), None))
    results = measure()
    assert problems("hopper_peers", results) == [] and results["unavailable"] == {}
    assert results["packages"].keys() == {"fa3", "fa4"} and results["cases"] == {"fa3": 4, "fa4": 4}
    forward, backward = results["points"]
    assert set(forward["timed"]) == {"ours", "lab 3", "flash", "cudnn", "fa3", "fa4"}
    assert set(backward["timed"]) == {*forward["timed"], "ours, fast"}
    assert {"fa3", "fa4"} <= set(forward["ours_over"]) & set(backward["ours_over"]) & set(backward["fast_over"])
    text = hopper_peers.table(results)
    assert "ours, fast x fa4" in text and "fa3 is flash-attn-3" in text and "right in 4 ragged cases" in text


def test_a_package_gets_its_layout_and_gives_the_courses(install):
    install(fa3=by_token)
    found, broken = hopper_peers.installed()
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    assert broken == {} and found.keys() == {"fa3"}
    for causal in (False, True):
        torch.testing.assert_close(found["fa3"](q, k, v, causal), plain(q, k, v, causal))


def test_what_is_not_installed_is_not_there(install, known_times):
    install(fa4=by_token)
    results = measure()
    assert results["packages"].keys() == {"fa4"} and results["unavailable"] == {}
    assert not any("fa3" in item["timed"] for item in results["points"])
    install()
    assert hopper_peers.installed() == ({}, {})
    with pytest.raises(RuntimeError, match="neither flash-attn-3 nor flash-attn-4 can be used"):
        measure()


@pytest.mark.slow
def test_a_wrong_package_is_not_timed_and_said_to_be_wrong(install, known_times):
    install(fa3=by_token, fa4=lambda *qkv, causal: by_token(*qkv))
    results = measure()
    assert results["packages"].keys() == {"fa3"} and not any("fa4" in item["timed"] for item in results["points"])
    assert (
        "causal=True: o: " in results["unavailable"]["fa4, D 16"]
        and "elements differ" in results["unavailable"]["fa4, D 16"]
    )
    assert "fa4, D 16: B=1 Hq=2" in hopper_peers.table(results)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_library_of_its_own", "ModuleNotFoundError: No module named 'a_library_of_its_own'"),
        ("raise OSError('libcudart.so.12: no such file')", "OSError: libcudart.so.12: no such file"),
        ("", "AttributeError: module 'flash_attn_interface' has no attribute 'flash_attn_func'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(install, monkeypatch, tmp_path, source, reason):
    install()
    (tmp_path / "flash_attn_interface.py").write_text(source)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    monkeypatch.syspath_prepend(tmp_path)
    assert hopper_peers.installed() == ({}, {"fa3": reason})
    sys.modules.pop("flash_attn_interface", None)


# ---- what a difference is worth --------------------------------------------------------------------------------------


@pytest.fixture
def tiles(install, monkeypatch):
    """FlashAttention-4 is installed, and tells with which tile it was called."""
    taken: list[tuple[str, int]] = []
    interface = ModuleType("flash_attn.cute.interface")
    config = dataclasses.make_dataclass("Config", ["m_block_size", "n_block_size", "dQ_swapAB"])
    interface._tile_size_fwd_sm90 = lambda *_: config(128, 80, False)
    interface._tile_size_bwd_sm90 = lambda *_: config(80, 128, True)

    def attention(*qkv, causal):
        taken.append((interface._tile_size_fwd_sm90(256).n_block_size, interface._tile_size_bwd_sm90(128).m_block_size))
        return by_token(*qkv, causal=causal)

    install(fa4=attention)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setattr(hopper_causes, "check_growing", lambda head_dims: None)
    monkeypatch.setattr(
        hopper_causes,
        "slack_calls",
        lambda shape: dict.fromkeys([("forward", "ours"), ("forward", "true maximum")], dict),
    )
    return taken


@pytest.mark.slow
def test_flash_attention_4_is_timed_with_its_tile_and_with_ours(tiles, known_times):
    shape = SHAPES[0]
    results = hopper_causes.measure(
        shapes=SHAPES, tile_shapes={"forward": SHAPES, "backward": SHAPES}, cases=CASES, effort=SHORT
    )
    assert problems("hopper_causes", results) == []
    assert set(tiles) == {(80, 80), (64, 64)}, "each with its own tile and with ours, and then its own again"
    (slack,), (forward, backward) = results["slack"], results["tiles"]
    assert set(slack["timed"]) == {"ours", "true maximum"}
    assert set(forward["timed"]) == {"ours", "fa4", "fa4, our tile"}
    assert set(backward["timed"]) == {"ours, fast", "fa4", "fa4, our tile"} and backward["causal"] == shape[4]
    text = hopper_causes.table(results)
    assert "ours x true maximum" in text and "fa4 x fa4, our tile" in text


def test_causes_need_flash_attention_4(install):
    install(fa3=by_token)
    with pytest.raises(RuntimeError, match="FlashAttention-4 cannot be used: it is not installed"):
        hopper_causes.measure(effort=SHORT)
