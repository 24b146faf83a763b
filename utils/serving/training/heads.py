"""Training of the draft head that comes with the course, on a CPU: ``python -m utils.serving.training.heads --out F``.

The target reads some of its training text once, and its last hidden states are kept. The head begins as the linear map
that predicts the next of them best (least squares), and then learns, several tokens deep from its own states, two
things: the target's hidden states (EAGLE's loss, cheap) and, at some of the positions, the target's distributions
(cross entropy, whose products with the output matrix are what costs). The same command on the same machine gives the
same weights; nothing depends on the time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.serving import MODELS, Decoder, attend_causally, load_model, load_tokenizer
from utils.serving.heads import DraftHead, load_head, save_head
from utils.serving.training.books import read_books
from utils.serving.training.corpus import split
from utils.serving.training.train import tokenize

#: Tokens at the beginning of a window of whose states nothing is learnt: too little stands before them.
BLIND = 8
#: Windows on which a head is judged.
HELD_OUT = 40
#: Windows that the target reads at a time.
TOGETHER = 16


@dataclass(frozen=True)
class Plan:
    """How to train.

    ``windows`` of ``context`` tokens are read, spread over the text. A step takes ``runs`` pieces of ``length``
    positions and goes ``depth`` tokens on from each position; distributions are compared at ``compared`` of them.
    """

    windows: int = 900
    context: int = 512
    steps: int = 600
    runs: int = 8
    length: int = 128
    compared: int = 128
    depth: int = 3
    lr: float = 2e-3
    intermediate_size: int = 512
    seed: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be over 0, got {value!r}")
        if BLIND + self.length + self.depth >= self.context:
            raise ValueError(
                f"a window of {self.context} tokens has no room for {BLIND} + {self.length} + {self.depth} and the next"
            )


def spread(tokens: Tensor, windows: int, context: int) -> Tensor:
    """At most ``windows`` windows (windows, context), evenly spread over tokens (T,).

    Raises:
        ValueError: not even one window.
    """
    every = tokens[: len(tokens) // context * context].view(-1, context)
    if not len(every):
        raise ValueError(f"a window has {context} tokens, the text has {len(tokens)}")
    return every[torch.linspace(0, len(every) - 1, min(windows, len(every))).long()]


@torch.no_grad()
def hidden_states(target: Decoder, windows: Tensor) -> Tensor:
    """The target's last hidden states of windows (W, N): (W, N, C) float16."""
    found = []
    for some in windows.split(TOGETHER):
        positions = torch.arange(some.shape[1]).expand_as(some)
        found.append(target.hidden(some, positions, attend_causally).half())
    return torch.cat(found)


@torch.no_grad()
def least_squares(head: DraftHead, target: Decoder, windows: Tensor, states: Tensor) -> None:
    """Set the head's linear map to the one that predicts the next hidden state with the least squared error."""
    C = head.hidden_size
    inputs, outputs = torch.zeros(2 * C + 1, 2 * C + 1), torch.zeros(2 * C + 1, C)
    for tokens, hidden in zip(windows, states.float(), strict=True):
        embedded = head.token_norm(F.embedding(tokens[BLIND + 1 :], target.embed_tokens.weight))
        x = torch.cat((hidden[BLIND:-1], embedded, embedded.new_ones(len(embedded), 1)), 1)
        inputs += x.T @ x
        outputs += x.T @ hidden[BLIND + 1 :]
    solved = torch.linalg.solve(inputs + torch.eye(len(inputs)), outputs)
    head.join.weight.copy_(solved[:-1].T)
    head.join.bias.copy_(solved[-1])


def new_head(target: Decoder, plan: Plan) -> DraftHead:
    """A head whose feed-forward block adds nearly nothing."""
    torch.manual_seed(plan.seed)
    head = DraftHead(target.config.hidden_size, plan.intermediate_size)
    for layer, deviation in ((head.gate_proj, 0.04), (head.up_proj, 0.04), (head.down_proj, 0.01)):
        nn.init.normal_(layer.weight, std=deviation)
    return head


def train(head: DraftHead, target: Decoder, windows: Tensor, states: Tensor, plan: Plan) -> None:
    """Train a head on windows (W, N) and the target's hidden states of them (W, N, C)."""
    least_squares(head, target, windows, states)
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    random, begun = torch.Generator().manual_seed(plan.seed), time.monotonic()
    for step in range(plan.steps):
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / plan.steps))
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, (step + 1) / 30) * cosine
        row = torch.randint(len(windows), (plan.runs, 1), generator=random)
        last = plan.context - plan.length - plan.depth
        place = torch.randint(BLIND, last, (plan.runs, 1), generator=random) + torch.arange(plan.length)
        rows = torch.randperm(plan.runs * plan.length, generator=random)[: plan.compared]
        loss = step_loss(head, target, windows, states, row, place, rows, plan.depth)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {plan.steps}, {time.monotonic() - begun:.0f} s: {loss.item():.4f}", flush=True)


def step_loss(
    head: DraftHead,
    target: Decoder,
    windows: Tensor,
    states: Tensor,
    row: Tensor,
    place: Tensor,
    rows: Tensor,
    depth: int,
) -> Tensor:
    """Squared error of the states plus cross entropy of the distributions at ``rows``, the mean over the depths."""
    embedding, output = target.embed_tokens.weight, target.lm_head.weight
    state, loss = states[row, place].float(), torch.zeros(())
    for ahead in range(1, depth + 1):
        state = head(state, F.embedding(windows[row, place + ahead], embedding))
        right = states[row, place + ahead].float()
        with torch.no_grad():
            wanted = (right.flatten(0, 1)[rows] @ output.T).softmax(-1)
        found = F.log_softmax(state.flatten(0, 1)[rows] @ output.T, -1)
        loss = loss + F.mse_loss(state, right) - (found * wanted).sum(-1).mean()
    return loss / depth


@torch.no_grad()
def evaluate(head: DraftHead, target: Decoder, windows: Tensor, depth: int = 6) -> list[dict[str, float]]:
    """How well each depth drafts on text, teacher-forced: a row for the token behind the next, and so on.

    ``loss``: nats per token of the text; ``accuracy``: the likeliest token is the text's; ``agreement``: it is the
    target's likeliest; ``acceptance``: the mean of ``sum_x min(target(x), head(x))``, the probability that a drawn
    candidate is accepted (Leviathan et al. 2023, corollary 3.6). ``target_loss`` and ``target_accuracy`` are the
    target's own of the same tokens, which it predicts with all that stands before them.

    Args:
        windows: (W, N) tokens, N over ``BLIND + depth + 1``.
        depth: of the deepest row.
    """
    totals = torch.zeros(depth, 6, dtype=torch.float64)
    for tokens in windows:
        hidden = hidden_states(target, tokens[None])[0].float()
        place = torch.arange(BLIND, len(tokens) - depth - 1)
        state = hidden[place]
        for ahead in range(1, depth + 1):
            state, logits = head.step(state, tokens[place + ahead], target)
            right, following = target.logits(hidden[place + ahead]), tokens[place + ahead + 1]
            totals[ahead - 1] += torch.stack([
                F.cross_entropy(logits, following), (logits.argmax(-1) == following).float().mean(),
                (logits.argmax(-1) == right.argmax(-1)).float().mean(),
                torch.minimum(logits.softmax(-1), right.softmax(-1)).sum(-1).mean(),
                F.cross_entropy(right, following), (right.argmax(-1) == following).float().mean(),
            ])  # fmt: skip
    names = ("loss", "accuracy", "agreement", "acceptance", "target_loss", "target_accuracy")
    return [dict(zip(names, row, strict=True)) for row in (totals / len(windows)).tolist()]


def texts(plan: Plan) -> tuple[Tensor, Tensor]:
    """Windows of the target's training text, as the plan says, and :data:`HELD_OUT` of the text that was held out."""
    tokenizer = load_tokenizer(MODELS / "target")
    training, held_out = (tokenize(tokenizer, documents) for documents in split(read_books()))
    return spread(training, plan.windows, plan.context), spread(held_out, HELD_OUT, plan.context)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m utils.serving.training.heads", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the head's folder")
    plan = Plan()
    for name, value in asdict(plan).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = vars(parser.parse_args(argv))
    out, plan = args.pop("out"), Plan(**args)
    target = load_model(MODELS / "target", dtype="float32")
    windows, held_out = texts(plan)
    print(f"{windows.numel():,} tokens to train on, {held_out.numel():,} held out", flush=True)
    states = hidden_states(target, windows)
    print("hidden states are there", flush=True)
    head = new_head(target, plan)
    train(head, target, windows, states, plan)
    save_head(head, out)
    # What is reported is what is shipped: the weights after rounding.
    metrics = {
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "training_tokens": windows.numel(),
        "held_out_tokens": held_out.numel(),
        "plan": asdict(plan),
        "depths": evaluate(load_head(out, target), target, held_out),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(metrics["depths"]), flush=True)


if __name__ == "__main__":
    main()
