"""The course's model with weights of 2 to 8 bits: what each way of rounding costs in loss on text held out of training.

Nothing is timed, so this runs on any machine: the figures are results of arithmetic, the same everywhere up to the
order of sums. The layers are calibrated on the excerpt of the training text that comes with the course, and judged on
the excerpt of the text that was held out. ``change`` is the change of the loss against the model as it is; ``error`` is
the standard error of that change, from its spread over the windows of held-out text. ``calibration`` has GPTQ with 3
bits and groups of 128 over the length of the calibration text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from utils.quantization import awq, bits_per_weight, gptq, quantize_decoder, round_to_nearest, window_losses
from utils.record_schemas import FINITE, NOT_NEGATIVE, POSITIVE, SIZE, TEXT, each
from utils.serving import MODELS, Decoder, load_model, load_tokenizer
from utils.serving.training.excerpts import excerpt
from utils.serving.training.train import tokenize

WINDOW = 256
CALIBRATION = 64  # windows
LENGTHS = (4, 16, 64)  # windows
METHODS = {"RTN": round_to_nearest, "AWQ": awq, "GPTQ": gptq}
BITS = (8, 4, 3, 2)
#: Columns that share a scale, by method; "row" is the whole row.
GROUPS: Mapping[str, Sequence[str]] = {"RTN": ("row", "128", "32"), "AWQ": ("128", "32"), "GPTQ": ("128", "32")}


def texts(tokenizer: Any, windows: int = CALIBRATION) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibration tokens (windows, WINDOW), spread over the training excerpt, and all held-out tokens (T,)."""
    training, held_out = (tokenize(tokenizer, excerpt(name)) for name in ("training", "held_out"))
    every = training[: len(training) // WINDOW * WINDOW].view(-1, WINDOW)
    chosen = torch.linspace(0, len(every) - 1, windows).long()
    return every[chosen], held_out


def round_model(model: Decoder, tokens: torch.Tensor, method: str, bits: int, group: str) -> Decoder:
    """The model with its layers' weights rounded by a method of :data:`METHODS`; see :data:`GROUPS`."""

    def rounding(weight: torch.Tensor, calibration: Any) -> torch.Tensor:
        columns = weight.shape[1] if group == "row" else int(group)
        return METHODS[method](weight, calibration, bits=bits, group=columns)

    return quantize_decoder(model, tokens, rounding)


SCHEMA = {
    "model": {"parameters": SIZE, "rounded": SIZE},
    **each(SIZE, "window", "calibration_tokens", "held_out_tokens"),
    "loss": POSITIVE,
    "ways": [
        {"method": TEXT, "bits": SIZE, "group": TEXT, "bits_per_weight": POSITIVE, "change": FINITE,
         "error": NOT_NEGATIVE}
    ],
    "calibration": [{"tokens": SIZE, "change": FINITE, "error": NOT_NEGATIVE}],
}  # fmt: skip


class Judge:
    """Rounds a model on calibration tokens (windows, WINDOW) and says what that costs on held-out tokens (T,)."""

    def __init__(self, model: Decoder, calibration: torch.Tensor, held_out: torch.Tensor) -> None:
        self.model, self.calibration, self.held_out = model, calibration, held_out
        self.losses = window_losses(model, held_out, WINDOW)

    def __call__(self, method: str, bits: int, group: str, windows: int | None = None) -> dict[str, float]:
        """``change`` of the loss and its standard ``error``; ``windows`` of the calibration are used, or all."""
        tokens = self.calibration[:: len(self.calibration) // windows] if windows else self.calibration
        tokens = tokens[:1] if method == "RTN" else tokens  # it looks at none
        rounded = round_model(self.model, tokens, method, bits, group)
        change = (window_losses(rounded, self.held_out, WINDOW) - self.losses).double()
        return {"change": float(change.mean()), "error": float(change.std() / len(change) ** 0.5)}


def measure(
    quick: bool = False, bits: Sequence[int] = BITS, windows: int = CALIBRATION, lengths: Sequence[int] = LENGTHS
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` takes 3 bits, little text and groups of 128."""
    model, tokenizer = load_model(MODELS / "target", dtype="float32"), load_tokenizer(MODELS / "target")
    groups, bits, windows, lengths = (
        (dict.fromkeys(METHODS, ("128",)), (3,), 4, (4,)) if quick else (GROUPS, bits, windows, lengths)
    )
    calibration, held_out = texts(tokenizer, windows)
    judge = Judge(model, calibration, held_out[: 4 * WINDOW + 1] if quick else held_out)
    ways = [
        {"method": method, "bits": width, "group": group,
         "bits_per_weight": bits_per_weight(model, width, None if group == "row" else int(group)),
         **judge(method, width, group)}
        for width in bits for method, chosen in groups.items() for group in chosen
    ]  # fmt: skip
    return {
        "model": {
            "parameters": model.config.parameters,
            "rounded": sum(p.numel() for p in model.layers.parameters() if p.ndim == 2),
        },
        "window": WINDOW,
        "calibration_tokens": calibration.numel(),
        "held_out_tokens": len(judge.losses) * WINDOW,
        "loss": float(judge.losses.mean()),
        "ways": ways,
        "calibration": [{"tokens": n * WINDOW, **judge("GPTQ", 3, "128", n)} for n in lengths],
    }


def table(results: dict[str, Any]) -> str:
    """Bits with scales, and the change of the loss."""
    rows = [
        [f"{way['method']} {way['bits']} bits, {way['group']}", f"{way['bits_per_weight']:.3f}",
         f"{way['change']:+.4f}", f"{way['error']:.4f}"]
        for way in results["ways"]
    ]  # fmt: skip
    rows += [
        [
            f"GPTQ 3 bits, 128, calibrated on {row['tokens']:,} tokens",
            "",
            f"{row['change']:+.4f}",
            f"{row['error']:.4f}",
        ]
        for row in results["calibration"]
    ]
    return benchmark_cli.text_table([f"loss {results['loss']:.4f}", "bits", "change, nats", "+-"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("weight_bits", measure, table, SCHEMA, needs_gpu=False))
