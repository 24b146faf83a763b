"""llm-compressor rounding the weights of :mod:`benchmarks.weight_bits` on the same text: its loss beside ours.

llm-compressor (``pip install llmcompressor``) is a library of the vLLM project, and the course does not need it. Both
get the same model, calibration tokens, bits and groups of 128, and both are judged on the same held-out text, each by
its own forward pass. Integers are not quite the same: with b bits the library has 2^b levels, from -2^(b-1) on, and the
course leaves the lowest one out, so that the range is symmetric. AWQ's search is wider in the library: it also looks at
the weights' magnitudes. Nothing is timed, so this runs on any machine.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks import benchmark_cli
from benchmarks.weight_bits import CALIBRATION, WINDOW, Judge, texts
from utils.record_schemas import FINITE, NOT_NEGATIVE, POSITIVE, SIZE, TEXT, each
from utils.serving import MODELS, load_model, load_tokenizer

PACKAGE = "llmcompressor"
GROUP = 128
BITS = (4, 3)
METHODS = ("RTN", "AWQ", "GPTQ")


def peer_model() -> Any:
    """The course's model as ``transformers`` loads it, in fp32.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(MODELS / "target"), dtype=torch.float32).eval()


@torch.no_grad()
def peer_losses(peer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """As :func:`utils.quantization.window_losses`, of a transformers model: (windows,)."""
    count = (len(tokens) - 1) // WINDOW
    x, y = (tokens[start : start + count * WINDOW].view(count, WINDOW) for start in (0, 1))
    return F.cross_entropy(peer(x, use_cache=False).logits.transpose(1, 2), y, reduction="none").mean(1)


def peer_rounded(method: str, bits: int, calibration: torch.Tensor) -> Any:
    """The model with its layers' weights rounded by llm-compressor, in groups of :data:`GROUP`.

    Args:
        method: one of :data:`METHODS`.
        calibration: (windows, WINDOW) tokens.

    Raises:
        ImportError: llm-compressor is not installed.
    """
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    scheme = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    rtn = QuantizationModifier(**scheme)
    recipe = {"RTN": lambda: [rtn], "GPTQ": lambda: [GPTQModifier(**scheme)], "AWQ": lambda: [AWQModifier(), rtn]}
    peer = peer_model()
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration.tolist()]
    with mock.patch.object(IntermediatesCache, "pin_memory"):  # AWQ calls it, and it needs a GPU
        oneshot(
            model=peer, dataset=Dataset.from_list(rows), recipe=recipe[method](), max_seq_length=WINDOW,
            num_calibration_samples=len(rows),
        )  # fmt: skip
    return peer


SCHEMA = {
    "package": TEXT,
    "group": SIZE,
    **each(SIZE, "calibration_tokens", "held_out_tokens"),
    "loss": POSITIVE,
    "peer_loss": POSITIVE,
    "ways": [
        {
            "method": TEXT,
            "bits": SIZE,
            **each(FINITE, "change", "peer_change"),
            **each(NOT_NEGATIVE, "error", "peer_error"),
        }
    ],
}


def measure(
    quick: bool = False, bits: Sequence[int] = BITS, windows: int = CALIBRATION, methods: Sequence[str] = METHODS
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` takes 3 bits and little text.

    Raises:
        ImportError: llm-compressor is not installed.
    """
    bits, windows = ((3,), 4) if quick else (bits, windows)
    model, tokenizer = load_model(MODELS / "target", dtype="float32"), load_tokenizer(MODELS / "target")
    calibration, held_out = texts(tokenizer, windows)
    held_out = held_out[: 4 * WINDOW + 1] if quick else held_out
    judge, base = Judge(model, calibration, held_out), peer_losses(peer_model(), held_out)
    ways = []
    for width in bits:
        for method in methods:
            ours = judge(method, width, str(GROUP))
            change = (peer_losses(peer_rounded(method, width, calibration), held_out) - base).double()
            theirs = {"peer_change": float(change.mean()), "peer_error": float(change.std() / len(change) ** 0.5)}
            ways.append({"method": method, "bits": width, **ours, **theirs})
            print(ways[-1], flush=True)
    return {
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "group": GROUP,
        "calibration_tokens": calibration.numel(),
        "held_out_tokens": len(base) * WINDOW,
        "loss": float(judge.losses.mean()),
        "peer_loss": float(base.mean()),
        "ways": ways,
    }


def table(results: dict[str, Any]) -> str:
    """Change of the loss, ours and the library's."""
    rows = [
        [f"{way['method']}, {way['bits']} bits", f"{way['change']:+.4f} ± {way['error']:.4f}",
         f"{way['peer_change']:+.4f} ± {way['peer_error']:.4f}"]
        for way in results["ways"]
    ]  # fmt: skip
    return benchmark_cli.text_table([f"loss {results['loss']:.4f}", "ours", results["package"]], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("weight_bits_peer", measure, table, SCHEMA, needs_gpu=False))
