"""Everything of lab 5 together, on a model of a few thousand weights: one text alone, beside others, and by drafts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from utils import runtime
from utils.checks.hidden import Observation
from utils.serving import Decoder, ModelConfig, SamplingParams, generate
from utils.serving.model import attend_causally

from .scenarios import Answer, CheckMismatch
from .stateful import Call, Machine

#: How far apart the two likeliest tokens are at every step of a text, at least: rounding never decides.
GAP = 1e-2
#: Each is a call of the run.
RULES = ("alone", "alone_by_drafts", "together", "in_batches", "twice", "together_by_drafts")


def served_model(rng: random.Random) -> Decoder:
    """Random weights in float32; the past weighs in what comes out."""
    config = ModelConfig(
        family="qwen3", vocab_size=23, hidden_size=24, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=16, max_seq_len=64, rope_theta=50.0, qk_norm=True, eos_token_ids=(),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.getrandbits(32))
        model = Decoder(config)
        for layer in model.layers:
            torch.nn.init.normal_(layer.self_attn.v_proj.weight, std=0.6)
            torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.6)
        torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    return model.eval()


def _gap(model: Decoder, prompt: Sequence[int], text: Sequence[int]) -> float:
    """The least distance of the two likeliest tokens at any step of a text."""
    text = [*prompt, *text]
    ids = torch.tensor(text, device=model.device)
    positions = torch.arange(len(text), device=model.device)
    best = model(ids, positions, attend_causally)[len(prompt) - 1 :].topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


class WatchedRunner:
    """A runner that remembers what is not written yet: an engine takes every error for a request's own."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.num_blocks, self.block_size = runner, runner.num_blocks, runner.block_size
        self.unwritten: NotImplementedError | None = None

    def run(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """As the runner's own."""
        try:
            return self.runner.run(*arguments, **options)
        except Exception as error:
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, NotImplementedError):
                reason = reason.__cause__  # an error within an interpreted kernel
            self.unwritten = self.unwritten or reason
            raise

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As the runner's own."""
        self.runner.copy_blocks(pairs)


class WholeEngineMachine(Machine):
    """The same prompts decoded one by one, then by engines on the student's kernels, the last one with drafts.

    Args:
        new: tokens of each text.
    """

    seconds = 60.0  # a GPU compiles the kernels first

    def __init__(self, answer: Answer, key: str, *, new: int = 8) -> None:
        super().__init__(answer, key)
        rng, self.new = self.random, new
        while True:
            self.model = served_model(rng)
            begin, *ends = ([rng.randrange(23) for _ in range(n)] for n in (9, 2, 1, 3, 1))
            self.prompts = [begin + ends[0], begin + ends[1], *ends[2:]]
            self.params = SamplingParams(max_new_tokens=new, ignore_eos=True)
            with torch.no_grad():
                self.right = [generate(self.model, prompt, self.params).tokens for prompt in self.prompts]
                if min(map(functools.partial(_gap, self.model), self.prompts, self.right)) > GAP:
                    break
        self.draft = copy.deepcopy(self.model)
        noise = torch.Generator().manual_seed(rng.getrandbits(60))
        with torch.no_grad():
            weight = self.draft.lm_head.weight
            weight += 0.3 * torch.randn(weight.shape, generator=noise).to(weight)
        self.served, self.drafting = (copy.deepcopy(model).to(runtime.DEVICE) for model in (self.model, self.draft))
        self.rules: list[Call] = [(rule,) for rule in RULES]
        self.seen: Observation = None

    def draw(self) -> Call | None:
        """Each rule once."""
        return self.rules.pop(0) if self.rules else None

    def is_possible(self, rule: str, *arguments: Any) -> bool:
        """Always."""
        return True

    def observation(self) -> Observation:
        """The texts."""
        return self.seen

    # ---- the rules
    def alone(self) -> None:
        """Each prompt in a batch of its own, with a cache of its own (5.1)."""
        self.shown.append("decode(model, [prompt], ...) for each prompt")
        texts = [self.answer["decode"](self.model, [prompt], self.new)[0] for prompt in self.prompts]
        self._compare(texts, "exercise 5.1 decides on this text")

    def alone_by_drafts(self) -> None:
        """Each prompt by speculative decoding (5.6)."""
        self.shown.append("speculative_generate(model, draft, prompt, params, 3) for each prompt")
        decode = self.answer["speculative_generate"]
        texts = [decode(self.model, self.draft, prompt, self.params, 3).tokens for prompt in self.prompts]
        self._compare(texts, "exercise 5.6 decides on this text")

    def together(self) -> None:
        """All prompts at a time in a pool that is too small for them (5.2 to 5.5)."""
        self.shown.append('Engine(model, runner=ModelRunner(model, 9, 4, attention="triton"), max_batch=3, ...)')
        runner = self._runner(self.served, 9)
        engine = self.answer["Engine"](self.served, runner=runner, max_batch=3, token_budget=6)
        self._generate(engine, runner)

    def in_batches(self) -> None:
        """The last two prompts by static batching."""
        self.shown.append('Engine(model, runner=..., scheduler="static") for the last two')
        runner = self._runner(self.served, 9)
        engine = self.answer["Engine"](self.served, runner=runner, scheduler="static", max_batch=2)
        self._generate(engine, runner, first=2)

    def twice(self) -> None:
        """One prompt, whose second answer begins as a fork of the first."""
        self.shown.append("Engine(model, runner=...): a second answer to one prompt, forked after the first token")
        runner = self._runner(self.served, 9)
        engine = self.answer["Engine"](self.served, runner=runner, max_batch=2)
        id = engine.add(self.prompts[1], self.params)
        first = engine.requests[id]
        with self._written(runner):
            while not first.output:
                engine.step()
            first.raise_if_failed()
            second = dataclasses.replace(first, id="second", output=list(first.output))
            engine.manager.fork(id, "second")
            engine.scheduler.running.append(second)
            engine.requests["second"] = second
            while engine.requests:
                engine.step()
            first.raise_if_failed()
            second.raise_if_failed()
        self._compare([first.output, second.output], "", [self.right[1]] * 2)

    def together_by_drafts(self) -> None:
        """The same with drafts: all exercises of the lab (but 5.1)."""
        self.shown.append("SpeculativeEngine(model, draft, draft_tokens=3, runner=..., draft_runner=..., ...)")
        runners = self._runner(self.served, 12), self._runner(self.drafting, 12)
        engine = self.answer["SpeculativeEngine"](
            self.served, self.drafting, draft_tokens=3, runner=runners[0], draft_runner=runners[1], max_batch=3,
            token_budget=12,
        )  # fmt: skip
        self._generate(engine, *runners)

    def _runner(self, model: Decoder, num_blocks: int, attention: str = "triton") -> WatchedRunner:
        options = {"attention": attention, "fused": False, "cuda_graphs": False}
        return WatchedRunner(self.answer["ModelRunner"](model, num_blocks, 4, **options))

    def _generate(self, engine: Any, *runners: WatchedRunner, first: int = 0) -> None:
        with self._written(*runners):
            texts = [answer.tokens for answer in engine.generate(self.prompts[first:], self.params)]
        self._compare(texts, "", self.right[first:])
        if used := engine.manager.num_used:
            raise CheckMismatch(f"block leak: {used} blocks in use after the last request")

    @contextmanager
    def _written(self, *runners: WatchedRunner) -> Iterator[None]:
        """Where a request fails since a place is not written yet, that is what is said."""
        try:
            yield
        except RuntimeError:
            for runner in runners:
                if runner.unwritten is not None:
                    raise runner.unwritten from None
            raise

    def _compare(self, texts: list[list[int]], cause: str, expected: list[list[int]] | None = None) -> None:
        self.seen = texts = [list(map(int, text)) for text in texts]
        for number, (text, right) in enumerate(zip(texts, expected or self.right, strict=True)):
            if text != right:
                raise CheckMismatch(
                    f"text {number + 1} of {len(texts)} is {' '.join(map(str, text))}, alone and without a cache "
                    f"{' '.join(map(str, right))}",
                    cause,
                )
