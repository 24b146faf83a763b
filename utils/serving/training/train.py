"""Training of the course's small models: next-token loss, or the distribution of a teacher (for a draft)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.serving.config import ModelConfig
from utils.serving.model import Decoder, attend_causally
from utils.serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """How long and how to train. Training ends with ``minutes`` or ``epochs``, whichever comes first.

    ``batch`` windows of ``context`` tokens a step; ``lr`` is the peak, reached after 2% and left on a cosine;
    ``dropout`` acts on the embedding and on what each block adds to the residual stream, in training only.
    """

    minutes: float
    epochs: float
    batch: int
    context: int
    lr: float
    dropout: float
    weight_decay: float = 0.1
    evaluate_every: int = 200
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("minutes", "epochs", "batch", "context", "lr", "evaluate_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be over 0, got {getattr(self, name)!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")


def tokenize(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """All documents, each after an end-of-text token, in one line: (T,) int64."""
    end = tokenizer.eos_token_ids[0]
    tokens = [[end, *encoding.ids] for encoding in tokenizer.backend.encode_batch(documents)]
    return torch.tensor([token for document in tokens for token in document] + [end])


def new_model(config: ModelConfig, seed: int) -> Decoder:
    """Fresh weights: normal, deviation 0.02, and less by sqrt(2 layers) where a block adds to the residual stream."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.num_layers) if adds else 0.02)
    return model


def _logits(model: Decoder, tokens: Tensor) -> Tensor:
    """(B, N, V) of whole windows (B, N), in bfloat16 arithmetic on a GPU."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        return model(tokens, positions, attend_causally)


@torch.no_grad()
def evaluate(model: Decoder, tokens: Tensor, context: int, teacher: Decoder | None = None) -> dict[str, float]:
    """``loss`` (nats a token) over all windows of held-out tokens (T,).

    With a teacher also ``acceptance``: the mean of ``sum_x min(teacher(x), model(x))``, which is the probability that
    speculative sampling accepts a drafted token (Leviathan et al. 2023, corollary 3.6).
    """
    was, total, accepted, count = model.training, 0.0, 0.0, 0
    model.eval()
    for window in tokens.split(context * 32):
        rows = max(1, (len(window) - 1) // context)
        width = min(context, len(window) - 1)
        if width < 1:
            continue
        x = window[: rows * width].view(rows, width).to(_device(model))
        y = window[1 : rows * width + 1].view(rows, width).to(x.device)
        logits = _logits(model, x).float()
        total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
        if teacher is not None:
            likely = _logits(teacher, x).float().softmax(-1)
            accepted += torch.minimum(likely, logits.softmax(-1)).sum().item()
    model.train(was)
    return {"loss": total / count} | ({} if teacher is None else {"acceptance": accepted / count})


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


class Trainer:
    """One run; it leaves the best weights in ``model``.

    Args:
        model: fresh, on its device.
        training, held_out: tokens (T,).
        plan: see :class:`Plan`.
        teacher: a model of the same vocabulary whose distribution is learnt instead of the text's own next token.
    """

    def __init__(
        self,
        model: Decoder,
        training: Tensor,
        held_out: Tensor,
        plan: Plan,
        teacher: Decoder | None = None,
    ) -> None:
        if len(training) <= plan.context + 1 or len(held_out) < 2:
            raise ValueError(f"too little text: {len(training)} and {len(held_out)} tokens, context {plan.context}")
        if teacher is not None and teacher.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"teacher and model must share a vocabulary, got {teacher.config.vocab_size} and "
                f"{model.config.vocab_size} tokens"
            )
        self.model, self.plan, self.teacher = model, plan, teacher
        self.training, self.held_out = training.to(_device(model)), held_out
        matrices = [weight for weight in model.parameters() if weight.ndim == 2]
        vectors = [weight for weight in model.parameters() if weight.ndim != 2]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95), fused=_device(model).type == "cuda")
        self.random = torch.Generator(device=_device(model)).manual_seed(plan.seed)
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self.best_metrics: dict[str, float] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.steps = max(1, math.ceil(plan.epochs * len(training) / (plan.batch * plan.context)))

    def run(self) -> dict[str, float]:
        """Train to the end of the plan: ``loss`` on held-out text, ``steps``, ``tokens_per_second`` and more."""
        hooks = [] if not self.plan.dropout else [m.register_forward_hook(self._drop) for m in self._dropped()]
        self.model.train()
        begun = time.monotonic()
        while (progress := self._progress()) < 1:
            self._train_step(progress)
            self.seconds = time.monotonic() - begun
            if self.step % self.plan.evaluate_every == 0:
                self._keep_best()
        self._keep_best()
        trained = self.step * self.plan.batch * self.plan.context
        for hook in hooks:
            hook.remove()
        self.model.load_state_dict(self.best_weights)
        self.model.eval()
        rate = trained / max(time.monotonic() - begun, 1e-9)
        return self.best_metrics | {"steps": self.step, "seconds": self.seconds, "tokens_per_second": rate}

    def _progress(self) -> float:
        return max(self.step / self.steps, self.seconds / (60 * self.plan.minutes))

    def _train_step(self, progress: float) -> None:
        plan = self.plan
        rise = min(1.0, (progress + 1e-3) / 0.02)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.lr * rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        device = self.training.device
        starts = torch.randint(len(self.training) - plan.context, (plan.batch, 1), generator=self.random, device=device)
        windows = self.training[starts + torch.arange(plan.context + 1, device=device)]
        x, y = windows[:, :-1], windows[:, 1:]
        logits = _logits(self.model, x).float().flatten(0, 1)
        if self.teacher is None:
            loss = F.cross_entropy(logits, y.flatten())
        else:
            with torch.no_grad():
                wanted = _logits(self.teacher, x).float().flatten(0, 1).softmax(-1)
            loss = F.cross_entropy(logits, wanted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1

    def _keep_best(self) -> None:
        metrics = evaluate(self.model, self.held_out, self.plan.context, self.teacher)
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"step {self.step:,} of {self.steps:,}, {self.seconds:.0f} s: held-out {told}", flush=True)
        # What a draft is for is acceptance; what a text model is for is loss.
        score = -metrics["acceptance"] if self.teacher is not None else metrics["loss"]
        if score < self.best:
            self.best, self.best_metrics = score, metrics
            self.best_weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _dropped(self) -> list[nn.Module]:
        layers = self.model.layers
        return [self.model.embed_tokens, *(layer.self_attn for layer in layers), *(layer.mlp for layer in layers)]

    def _drop(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, self.plan.dropout, self.model.training)
