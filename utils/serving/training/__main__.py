"""``python -m utils.serving.training --size target --corpus FILE --tokenizer FOLDER --out FOLDER --minutes 5``."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from utils.serving.config import ModelConfig
from utils.serving.load import load_model, save_model
from utils.serving.tokenizer import load_tokenizer
from utils.serving.training.card import device_name, samples, write_card
from utils.serving.training.corpus import read_corpus, split
from utils.serving.training.train import Plan, Trainer, evaluate, new_model, tokenize

#: hidden size, feed-forward size, layers, query heads, key heads, head dimension, peak learning rate, dropout.
SIZES = {
    "target": (256, 768, 8, 4, 2, 64, 2e-3, 0.2),
    "draft": (128, 384, 3, 4, 2, 32, 3e-3, 0.0),
    "toy": (32, 64, 2, 2, 1, 16, 3e-3, 0.1),
}


def model_config(size: str, vocab_size: int, context: int, end: int) -> ModelConfig:
    """The configuration of one of :data:`SIZES`: Qwen3's architecture, head tied to the embedding."""
    hidden, feed_forward, layers, heads, kv_heads, head_dim, _, _ = SIZES[size]
    return ModelConfig(
        family="qwen3", vocab_size=vocab_size, hidden_size=hidden, intermediate_size=feed_forward, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_seq_len=context, qk_norm=True, tied_head=True,
        bos_token_id=end, eos_token_ids=(end,), dtype="bfloat16",
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m utils.serving.training", description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="what utils.serving.training.corpus wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="what utils.serving.training.vocabulary wrote")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--minutes", type=float, default=5.0, help="time to train at most")
    parser.add_argument("--epochs", type=float, default=40.0, help="times to read the text at most")
    parser.add_argument("--batch", type=int, default=32, help="windows a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window, and positions of the model")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the size's own")
    parser.add_argument("--dropout", type=float, help="instead of the size's own")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--teacher", type=Path, help="a model's folder: learn its distribution")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    lr = SIZES[args.size][6] if args.lr is None else args.lr
    dropout = SIZES[args.size][7] if args.dropout is None else args.dropout
    plan = Plan(args.minutes, args.epochs, args.batch, args.context, lr, dropout,
                evaluate_every=args.evaluate_every, seed=args.seed)  # fmt: skip

    torch.set_float32_matmul_precision("high")
    tokenizer = load_tokenizer(args.tokenizer)
    training, held_out = split(read_corpus(args.corpus))
    bytes_per_token = len("".join(held_out).encode()) / len(held := tokenize(tokenizer, held_out))
    tokens = tokenize(tokenizer, training)
    config = model_config(args.size, tokenizer.vocab_size, args.context, tokenizer.eos_token_ids[0])
    print(f"{config.parameters:,} parameters, {len(tokens):,} tokens to train on, {len(held):,} held out", flush=True)
    teacher = None
    if args.teacher is not None:
        teacher = load_model(args.teacher, dtype="float32", device=args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    model = new_model(config, args.seed).to(args.device)
    metrics = Trainer(model, tokens, held, plan, teacher).run()

    save_model(model, args.out, dtype="bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.out / name)
    # What is reported is what is shipped: the weights after rounding.
    shipped = load_model(args.out, dtype="float32", device=args.device)
    metrics |= evaluate(shipped, held, args.context, teacher)
    command = ["python -m utils.serving.training", f"--size {args.size} --corpus {args.corpus.name}"]
    command += [f"--tokenizer {args.tokenizer.name} --out {args.out.name} --minutes {args.minutes:g}"]
    command += [f"--epochs {args.epochs:g} --batch {args.batch} --context {args.context} --lr {lr:g}"]
    command += [f"--dropout {dropout:g} --evaluate-every {args.evaluate_every} --seed {args.seed}"]
    command += [f"--teacher {args.teacher.name}"] if args.teacher else []
    texts = samples(load_model(args.out, dtype="float32"), tokenizer)
    device = device_name(torch.device(args.device))
    write_card(args.out, f"{args.size} model", config, metrics, bytes_per_token, command, device, texts)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
