"""Random workloads, each played through an engine and held against one request at a time.

Every greedy or seeded request must get exactly the tokens of ``utils.serving.generate``; requests that are aborted or
fail must have got a beginning of them; the invariants of the block manager must hold after every step, no block that is
written may be shared or be found by its prefix, and in the end no block may be in use.

Exact tokens can be asked for although an engine sums in another order than plain generation: the model is random
with wide logits, so that rounding hardly ever decides on a token.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from solutions.lab5_serving import BlockManager, Engine, ModelRunner, Request, RequestOutput, Step
from utils.serving import Decoder, ModelConfig, SamplingParams, attend_causally, generate

#: A few roundings of the logits, which spread over +-10.
TIE = 5e-6


@cache
def tiny_model(seed: int = 0) -> Decoder:
    """A random decoder of 20,000 weights; each token of the context matters to it, and its logits spread over +-10."""
    config = ModelConfig(
        "qwen3", vocab_size=61, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, max_seq_len=96, qk_norm=True, eos_token_ids=(7, 11, 23),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 1 if "embed" in name else (4 if "lm_head" in name else 1) / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif "q_norm" in name or "k_norm" in name:
                weight.fill_(1.5)
    return model


def disturbed(model: Decoder) -> Decoder:
    """A draft that often, but not always, thinks as the model does: the same weights with a little noise."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += torch.randn(weight.shape, generator=generator) * 0.1 * weight.std(correction=0)
    return draft


@dataclass
class Ask:
    """One request of a workload: when it comes, and what happens to it on its way."""

    id: str
    prompt: list[int]
    params: SamplingParams
    step: int
    abort: int | None = None  # at which step its client gives up
    fails_at: int | None = None  # the model fails when it computes the token at this position


@dataclass
class Workload:
    """Requests and the settings of an engine, all drawn from one seed."""

    seed: int
    asks: list[Ask]
    settings: dict[str, object]
    hopeless: list[list[int]] = field(default_factory=list)  # prompts that must be refused on arrival


def draw_workload(seed: int, model: Decoder, longest: int = 20, most_new: int = 44) -> Workload:
    """A workload of 1 to 10 requests for a pool that may hold anything from one request to all of them."""
    rng = random.Random(seed)
    vocabulary, room = model.config.vocab_size, model.config.max_seq_len
    beginnings = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, longest - 1))] for _ in range(3)]
    asks = []
    for number in range(rng.randint(1, 10)):
        length = rng.randint(1, longest)
        shared = rng.choice(beginnings)[:length] if rng.random() < 0.6 else []
        prompt = shared + [rng.randrange(vocabulary) for _ in range(length - len(shared))]
        params = SamplingParams(
            rng.randint(1, most_new), temperature=rng.choice([0.0, 0.0, 0.0, 0.8]), top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1000), ignore_eos=rng.random() < 0.5,
        )  # fmt: skip
        ask = Ask(f"r{number}", prompt, params, step=rng.choice([0, 0, rng.randint(0, 30)]))
        fate = rng.random()
        if fate < 0.15:
            ask.abort = ask.step + rng.randint(0, 30)
        elif fate < 0.25:
            ask.fails_at = rng.randrange(length + params.max_new_tokens)
        asks.append(ask)
    block_size = rng.randint(1, 16)
    most = max(min(len(ask.prompt) + ask.params.max_new_tokens, room) for ask in asks)
    least = -(-(most - 1) // block_size)
    max_batch = rng.choice([1, 2, 4, 8, 8])
    settings = {
        "num_blocks": rng.choice([least, least + rng.randint(0, least), least * rng.randint(1, 6)]),
        "block_size": block_size,
        "max_batch": max_batch,
        "token_budget": rng.choice([max_batch + rng.randint(0, 16), 256]),
        "chunked_prefill": rng.random() < 0.75,
        "scheduler": rng.choice(["continuous", "continuous", "static"]),
        "prefix_caching": rng.random() < 0.7,
    }
    pool = settings["num_blocks"] * block_size
    hopeless = [[1] * (pool + 1)] if pool + 1 < room else []
    return Workload(seed, asks, settings, [*hopeless, [], [vocabulary], [0] * room])


class WatchedRunner(ModelRunner):
    """A runner that looks at what it is asked to write, and that fails where a workload says so."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, fails_at: dict[str, int]) -> None:
        super().__init__(model, num_blocks, block_size)
        self.fails_at = fails_at

    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> torch.Tensor:
        written = Counter()
        for chunk in step.chunks:
            end, table = chunk.start + chunk.count, manager.table(chunk.request.id)
            assert 0 <= chunk.start < end, f"an empty chunk: {chunk}"
            assert end <= manager.length(chunk.request.id), f"a chunk without slots: {chunk}"
            for index in range(chunk.start // manager.block_size, (end - 1) // manager.block_size + 1):
                block = table[index]
                written[block] += 1
                assert manager.references(block) == 1, f"block {block} is written while it is shared"
                digests = manager.sequence(chunk.request.id).digests
                assert index >= len(digests), f"block {block} is written while its prefix can be found"
        assert not written or max(written.values()) == 1, "a block is written by two requests"
        for chunk in step.chunks:
            bad = self.fails_at.get(chunk.request.id)
            if bad is not None and chunk.start <= bad < chunk.start + chunk.count:
                raise ArithmeticError(f"injected at position {bad}")
        return super().run(step, manager, rows)


def check_step(engine: Engine) -> None:
    """What must hold between two steps."""
    manager, scheduler, budget = engine.manager, engine.scheduler, engine.scheduler.token_budget
    manager.check()
    assert sorted(manager.sequences) == sorted(request.id for request in scheduler.running), "blocks without a request"
    assert len(scheduler.running) <= scheduler.max_batch
    assert len(engine.requests) == len(scheduler.running) + len(scheduler.waiting), "a request is lost"
    for request in scheduler.running:
        assert request.computed <= manager.length(request.id) <= len(request.tokens)
    for request in scheduler.waiting:
        assert request.computed == 0
    if engine.history:
        tokens = engine.history[-1].tokens
        whole = not scheduler.chunked_prefill and max(tokens.values(), default=0) > 1
        assert sum(tokens.values()) <= budget or whole, "a step is over the budget"


def play(workload: Workload, model: Decoder, make_engine: Callable[..., Engine] = Engine) -> Counter[str]:
    """Play a workload, assert all of the above, and count what happened."""
    fails_at = {ask.id: ask.fails_at for ask in workload.asks if ask.fails_at is not None}
    settings = dict(workload.settings)
    runner = WatchedRunner(model, settings.pop("num_blocks"), settings.pop("block_size"), fails_at)
    engine = make_engine(model, runner=runner, **settings)
    requests, outputs, ended, counts = {}, {}, {}, Counter(workloads=1)

    for prompt in workload.hopeless:
        try:
            engine.add(prompt)
        except ValueError:
            counts["refused"] += 1
        else:
            raise AssertionError(f"a prompt of {len(prompt)} tokens was not refused")
    coming, number = sorted(workload.asks, key=lambda ask: ask.step), 0
    while coming or engine.has_work or number <= 60:
        while coming and coming[0].step <= number:
            ask = coming.pop(0)
            engine.add(ask.prompt, ask.params, id=ask.id)
            requests[ask.id], outputs[ask.id] = engine.requests[ask.id], []
        for ask in workload.asks:
            if ask.abort == number:
                engine.abort(ask.id)
        for output in engine.step():
            outputs[output.id] += output.new_tokens
            if output.finished:
                assert output.id not in ended, f"{output.id} ended twice"
                ended[output.id] = output
        check_step(engine)
        number += 1
        assert number < 5000, "the engine does not come to an end"
    assert set(ended) == set(requests), f"never reported: {set(requests) - set(ended)}"
    assert engine.manager.num_used == 0, "blocks have leaked"
    for id, request in requests.items():
        judge(model, request, outputs[id], ended[id], counts)
    totals = engine.stats()
    for name in ("steps", "preemptions", "cached_tokens", "computed_tokens", "generated_tokens", "accepted_tokens"):
        counts[name] += totals.get(name, 0)
    return counts


def is_tie(model: Decoder, request: Request, output: list[int], expected: list[int]) -> bool:
    """Whether two greedy texts part at two tokens whose exact logits are closer than float32 rounds them."""
    same = next((i for i, pair in enumerate(zip(output, expected)) if pair[0] != pair[1]), None)
    if same is None or request.params.temperature:
        return False
    text = torch.tensor([*request.prompt, *output[:same]])
    logits = copy.deepcopy(model).double()(text, torch.arange(len(text)), attend_causally)[-1]
    chosen = logits[[output[same], expected[same]]]
    return bool(logits.max() - chosen.min() < TIE)


def judge(model: Decoder, request: Request, output: list[int], end: RequestOutput, counts: Counter[str]) -> None:
    """One request against its unbatched decode."""
    expected = generate(model, request.prompt, request.params)
    assert output == request.output, f"{request.id}: what was reported is not what was generated"
    reason = end.finish_reason
    counts.update(["requests", reason])
    if reason in ("abort", "error"):
        assert output == expected.tokens[: len(output)], f"{request.id}: {output}, not a beginning of {expected.tokens}"
        assert reason == "abort" or "injected" in end.error, f"{request.id}: {end.error}"
    elif (output, reason) != (expected.tokens, expected.finish_reason):
        assert is_tie(model, request, output, expected.tokens), (
            f"{request.id}: {output} {reason}, not {expected.tokens} {expected.finish_reason}"
        )
        counts["ties"] += 1  # what comes behind depends on how it was broken
