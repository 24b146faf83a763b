"""The engine with overlapped scheduling: the tokens of the plain one, no wait before a launch, and no block left."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from parameters import thorough_but
from token_identity import WatchedRunner, Workload, draw_workload, play, tiny_model

from solutions.lab5_serving import Engine, ModelRunner
from solutions.lab5_serving.block_pool import prefix_digest
from solutions.lab5_serving.logprobs import scored
from solutions.lab5_serving.request import Request
from solutions.lab5_serving.sampling import choose
from solutions.lab6_frontiers.low_bit_runner import LowBitRunner
from solutions.lab6_frontiers.overlapped_engine import OverlappedEngine
from solutions.lab6_frontiers.overlapped_runner import OverlappedRunner
from solutions.lab6_frontiers.overlapped_sampling import choose_later
from solutions.lab6_frontiers.simulated_device import (
    SimulatedRunner,
    StepTimes,
    VirtualClock,
    device_gaps,
    waiting_share,
)
from utils import runtime
from utils.serving import SamplingParams, generate

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


class WatchedOverlappedRunner(OverlappedRunner, WatchedRunner):
    """A runner with placeholders that looks at what it is asked to write, and fails where a workload says so."""


class WatchedEngine(OverlappedEngine):
    """Nobody is preempted whose token is not read, and no unknown token can be found by its prefix."""

    overlapped = 0

    def _launch(self, landing):
        flight = super()._launch(landing)
        if flight is not None and landing is not None:
            assert not flight.step.preempted, "preempted while a step is in flight"
            self.overlapped += 1
        return flight

    def step(self):
        outputs = super().step()
        for sequence in self.manager.sequences.values():
            committed = sequence.tokens[: len(sequence.digests) * self.manager.block_size]
            assert min(committed, default=0) >= 0, "a placeholder is committed"
        return outputs


def watched(engines=None):
    """What makes an engine of a workload; each is added to ``engines``."""

    def make(model, runner, **settings):
        own = WatchedOverlappedRunner(model, runner.num_blocks, runner.block_size, runner.fails_at)
        engine = WatchedEngine(model, runner=own, **settings)
        if engines is not None:
            engines.append(engine)
        return engine

    return make


def small_workload(seed) -> Workload:
    return draw_workload(seed, tiny_model(), longest=14, most_new=16)


def engine_of(**settings):
    return OverlappedEngine(tiny_model(), **{"num_blocks": 40, "block_size": 4} | settings)


def run(engine):
    """Step to the end with the block manager checked; every output, by request."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        engine.manager.check()
    assert engine.manager.num_used == 0
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.new_tokens]


def random_prompts(count, seed=0, longest=12):
    draw = random.Random(seed)
    return [[draw.randrange(61) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def stopping_prompt(least=3, most=20):
    """A prompt whose greedy text comes to an end of text by itself, after ``least`` to ``most`` tokens."""
    params = SamplingParams(max_new_tokens=40)
    for prompt in random_prompts(200, seed=5):
        found = generate(tiny_model(), prompt, params)
        if found.finish_reason == "stop" and least <= len(found.tokens) <= most:
            return prompt, found.tokens
    raise AssertionError("no prompt of 200 stops")


# ---- token identity --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ten", thorough_but(range(100), 0, 1))
def test_random_workloads_give_each_request_its_unbatched_decode(ten):
    """Pools as small as one request, chunks, aborts, failures, shared beginnings, drawn tokens: 10 workloads each."""
    for seed in range(10 * ten, 10 * ten + 10):
        play(small_workload(seed), tiny_model(), watched())


@pytest.mark.slow
@pytest.mark.parametrize("workloads", thorough_but((12, 24), 12))
def test_the_random_workloads_cover_what_they_are_for(workloads):
    engines, counts = [], Counter()
    for seed in range(workloads):
        counts += play(small_workload(seed), tiny_model(), watched(engines))
    for engine in engines:
        counts["surplus_tokens"] += engine.stats()["surplus_tokens"]
        counts["overlapped"] += engine.overlapped
    for name in ("preemptions", "cached_tokens", "abort", "error", "stop", "length", "surplus_tokens"):
        assert counts[name] > 0, name
    assert counts["overlapped"] > counts["steps"] / 2


def test_a_batch_gets_the_plain_engines_tokens_and_draws_the_same_random_numbers():
    model, prompts = tiny_model(), random_prompts(7)
    settings = [(0.0, 0, 1.0), (0.9, 0, 1.0), (0.9, 5, 1.0), (0.9, 0, 0.8), (1.3, 5, 0.8), (0.9, 0, 1.0), (0.5, 0, 1.0)]
    params = [
        SamplingParams(max_new_tokens=9 + seed, temperature=t, top_k=k, top_p=p, seed=seed)
        for seed, (t, k, p) in enumerate(settings)
    ]
    plain = Engine(model, num_blocks=60, block_size=4).generate(prompts, params)
    assert engine_of(num_blocks=60).generate(prompts, params) == plain
    squeezed = engine_of(num_blocks=9, max_batch=4, token_budget=7)
    assert squeezed.generate(prompts, params) == plain
    assert squeezed.stats()["preemptions"] > 0


def test_tokens_chosen_later_are_those_chosen_at_once_and_leave_the_generators_alike():
    chance = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 50, generator=chance) * 5
    logits[4, 7], logits[9, 0] = torch.nan, torch.inf

    def requests():
        settings = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 4, 1.0), (0.7, 4, 0.6), (1.0, 0, 1.0)]
        return [
            Request(str(row), [1], SamplingParams(temperature=t, top_k=k, top_p=p, seed=row))
            for row, (t, k, p) in ((row, settings[row % 5]) for row in range(12))
        ]

    now, later = requests(), requests()
    now[6].generator = later[6].generator = "no generator"
    tokens, failed = choose(logits, now)
    found, wrong = choose_later(logits, later)
    assert found.shape == (2, 12) and found.dtype == torch.int64
    assert found[1].tolist() == [row not in (4, 9) for row in range(12)]
    assert set(wrong) == {"6"} and set(failed) == {"4", "6", "9"} and wrong["6"] == failed["6"]
    good = [row for row in range(12) if str(row) not in failed]
    assert [found[0, row].item() for row in good] == [tokens[row] for row in good]
    assert found[0].min() >= 0 and found[0].max() < 50
    for one, other in zip(now, later, strict=True):
        if isinstance(one.generator, torch.Generator):
            assert torch.equal(one.generator.get_state(), other.generator.get_state())


def test_steps_padded_to_the_size_of_a_recorded_one_give_the_same_tokens():
    model = tiny_model()
    runner = OverlappedRunner(model, 60, 4, cuda_graphs=True, graph_chunks=[4])
    prompts = random_prompts(5)
    found = OverlappedEngine(model, runner=runner).generate(prompts, GREEDY)
    assert found == [generate(model, prompt, GREEDY) for prompt in prompts]
    assert 1 in {tokens for _, tokens, _ in runner.graphs.recorded}


def test_a_decode_step_runs_the_longest_contexts_first_and_one_with_a_prompt_as_it_was_scheduled():
    steps = []

    class Noting(OverlappedRunner):
        def run(self, step, manager):
            steps.append([(chunk.request.id, chunk.start, chunk.count) for chunk in step.chunks])
            return super().run(step, manager)

    model, lengths = tiny_model(), {"a": 3, "b": 9, "c": 20, "d": 6}
    engine = OverlappedEngine(model, runner=Noting(model, 60, 4), max_batch=8, token_budget=16)
    prompts = {id: [7 + i % 11 for i in range(length)] for id, length in lengths.items()}
    for id, prompt in prompts.items():
        engine.add(prompt, GREEDY, id=id)
    outputs = run(engine)
    for id, prompt in prompts.items():
        assert tokens_of(outputs[id]) == generate(model, prompt, GREEDY).tokens
    with_prompts = [step for step in steps if any(count > 1 for *_, count in step)]
    assert [id for id, *_ in with_prompts[0]] == ["a", "b", "c"]  # as they came
    of_all = [[id for id, *_ in step] for step in steps if len(step) == 4 and step not in with_prompts]
    assert len(of_all) > 2 and all(step == ["c", "b", "d", "a"] for step in of_all)


def test_the_kernels_and_the_fused_layers_give_the_same_tokens():
    from serving_runs import tiny_model as sixteen  # heads of 16: the least that the kernels take

    model, own = sixteen(), SamplingParams(max_new_tokens=6, ignore_eos=True)
    expected = [generate(model, prompt, own) for prompt in ([3, 4], [5])]
    for options in ({"attention": "triton"}, {"attention": "triton", "fused": True}):
        runner = OverlappedRunner(model, 20, 4, **options)
        assert OverlappedEngine(model, runner=runner).generate([[3, 4], [5]], own) == expected, options


def test_a_runner_of_few_bits_can_be_overlapped():
    class Both(OverlappedRunner, LowBitRunner):
        pass

    model, prompts = tiny_model(), random_prompts(4)
    plain = Engine(model, runner=LowBitRunner(model, 30, 4, cache="fp8")).generate(prompts, GREEDY)
    assert OverlappedEngine(model, runner=Both(model, 30, 4, cache="fp8")).generate(prompts, GREEDY) == plain


# ---- what the host learns late ---------------------------------------------------------------------------------------


def test_an_end_of_text_costs_one_surplus_token_and_a_known_length_none():
    prompt, tokens = stopping_prompt()
    engine = engine_of()
    id = engine.add(prompt, SamplingParams(max_new_tokens=40))
    outputs = run(engine)
    assert tokens_of(outputs[id]) == tokens and outputs[id][-1].finish_reason == "stop"
    stats = engine.stats()
    assert (stats["steps"], stats["surplus_tokens"], stats["generated_tokens"]) == (len(tokens) + 1, 1, len(tokens))
    for limit in (1, 2, len(tokens)):  # the last: the end of text is the last token that is wanted
        engine = engine_of()
        engine.add(prompt, SamplingParams(max_new_tokens=limit))
        run(engine)
        stats = engine.stats()
        assert (stats["steps"], stats["surplus_tokens"]) == (limit, 0)
        assert stats["computed_tokens"] == len(prompt) + limit - 1


def test_what_is_surplus_is_never_found_as_a_prefix():
    """Block size 1: each token that is committed is a block; the end of text itself is only fed to the surplus step."""
    prompt, tokens = stopping_prompt()
    engine = engine_of(block_size=1, num_blocks=80)
    engine.add(prompt, SamplingParams(max_new_tokens=40))
    run(engine)
    text = prompt + tokens
    assert len(engine.manager.cached_prefix([*text, 1, 2])[0]) == len(text) - 1


@pytest.mark.parametrize("seed", range(4))
def test_every_block_that_can_be_found_holds_the_keys_and_values_of_its_prefix(seed):
    model, size = tiny_model(), 2
    runner = OverlappedRunner(model, 40, size)
    engine = OverlappedEngine(model, runner=runner, max_batch=4, token_budget=9)
    beginning = random_prompts(1, seed)[0]
    prompts = [beginning + prompt for prompt in random_prompts(7, seed, longest=5)]
    params = [
        SamplingParams(max_new_tokens=25, temperature=seed % 2 * 0.8, seed=number) for number in range(len(prompts))
    ]
    requests = [engine.requests[engine.add(*each)] for each in zip(prompts, params, strict=True)]
    engine.step()
    engine.step()
    engine.abort(requests[1].id)
    run(engine)
    found = 0
    for request in requests:
        blocks, digests = engine.manager.cached_prefix([*request.tokens, 0])
        fresh = Engine(model, num_blocks=60, block_size=size)
        fresh.add(request.tokens, GREEDY, id="fresh")
        fresh.step()
        table = fresh.manager.table("fresh")
        for index, block in enumerate(blocks):
            for name in ("key_cache", "value_cache"):
                own, right = getattr(runner, name)[:, block], getattr(fresh.runner, name)[:, table[index]]
                torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)
        found += len(digests)
    known = set()
    for request in requests:
        digest = b""
        for end in range(size, len(request.tokens) + 1, size):
            digest = prefix_digest(digest, request.tokens[end - size : end])
            known.add(digest)
    assert found and set(engine.manager.pool._block_of) <= known


def test_a_new_request_may_take_the_id_and_the_blocks_of_one_whose_surplus_step_is_in_flight():
    prompt, tokens = stopping_prompt()
    model, engine = tiny_model(), engine_of(num_blocks=12, prefix_caching=False)
    engine.add(prompt, SamplingParams(max_new_tokens=30), id="a")
    outputs = []
    while "a" in engine.requests:
        outputs += engine.step()
    assert engine.has_work and engine.manager.num_used == 0
    engine.add([5, 6], GREEDY, id="a")
    later = run(engine)["a"]
    assert tokens_of(outputs) == tokens and tokens_of(later) == generate(model, [5, 6], GREEDY).tokens
    assert engine.stats()["surplus_tokens"] == 1


def test_tokens_are_read_first_where_somebody_might_be_preempted():
    """Two requests fill the pool; the older one ends. Read one step late, its end would cost the other a preemption."""
    prompt, tokens = stopping_prompt()
    model, size = tiny_model(), 1
    blocks = 2 * (len(prompt) + len(tokens) - 1)
    engine = engine_of(num_blocks=blocks, block_size=size, max_batch=2, prefix_caching=False)
    engine.add(prompt, SamplingParams(max_new_tokens=len(tokens) + 5), id="ends")
    other = [*prompt[:-1], (prompt[-1] + 1) % 61]
    engine.add(other, SamplingParams(max_new_tokens=len(tokens) + 5, ignore_eos=True), id="stays")
    outputs = run(engine)
    assert engine.stats()["preemptions"] == 0
    assert tokens_of(outputs["ends"]) == tokens
    assert tokens_of(outputs["stays"]) == outputs["stays"][-1].request.output
    assert tokens_of(outputs["stays"]) == generate(model, other, outputs["stays"][-1].request.params).tokens


# ---- failures and aborts ---------------------------------------------------------------------------------------------


class Faulty(OverlappedRunner):
    """Raises, or gives logits that are not finite, when the marked position of a request is computed."""

    def __init__(self, kind, id, position, **options):
        super().__init__(tiny_model(), 40, 4, **options)
        self.kind, self.id, self.position = kind, id, position

    def run(self, step, manager, rows="last"):
        bad = [
            chunk.request.id == self.id and chunk.start <= self.position < chunk.start + chunk.count
            for chunk in step.chunks
        ]
        if self.kind == "raises" and any(bad):
            raise ArithmeticError("injected")
        logits = super().run(step, manager, rows)
        samples = [chunk.samples for chunk in step.chunks]
        wrong = [each for each, yields in zip(bad, samples, strict=True) if yields]
        logits[torch.tensor(wrong, dtype=torch.bool)] = torch.nan
        return logits


@pytest.mark.parametrize("position", [0, 3, 4, 7])
@pytest.mark.parametrize(("kind", "says"), [("raises", "model failed: ArithmeticError: injected"), ("nan", "finite")])
def test_a_request_that_fails_ends_alone_with_the_tokens_before(kind, says, position):
    model = tiny_model()
    engine = OverlappedEngine(model, runner=Faulty(kind, "bad", position))
    prompts = {"before": [1, 2, 3], "bad": [4, 5, 6, 8], "after": [6, 7]}
    for id, prompt in prompts.items():
        engine.add(prompt, GREEDY, id=id)
    outputs = run(engine)
    expected = {id: generate(model, prompt, GREEDY).tokens for id, prompt in prompts.items()}
    assert outputs["bad"][-1].finish_reason == "error" and says in outputs["bad"][-1].error
    assert tokens_of(outputs["bad"]) == expected["bad"][: max(0, position - 3)]
    assert [tokens_of(outputs[id]) for id in ("before", "after")] == [expected["before"], expected["after"]]
    assert engine.manager.cached_prefix([*prompts["bad"], *expected["bad"]])[0] == []  # nobody reuses a failure's
    assert engine.manager.cached_prefix([*prompts["before"], *expected["before"]])[0] != []
    assert engine.stats()["error"] == 1


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_a_failure_in_a_surplus_step_is_nobodys(kind):
    prompt, tokens = stopping_prompt()
    position = len(prompt) + len(tokens) - 1  # the end of text, which only the surplus step computes
    engine = OverlappedEngine(tiny_model(), runner=Faulty(kind, "a", position))
    engine.add(prompt, SamplingParams(max_new_tokens=40), id="a")
    outputs = run(engine)["a"]
    assert tokens_of(outputs) == tokens and outputs[-1].finish_reason == "stop"
    assert engine.stats()["error"] == 0


def test_a_sampler_that_fails_ends_its_own_request_alone():
    model, engine = tiny_model(), engine_of()
    params = [SamplingParams(max_new_tokens=6, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    ids = [engine.add([1, 2, 3], own) for own in params]
    engine.step()
    engine.requests[ids[1]].generator = "no generator"
    outputs = run(engine)
    assert outputs[ids[1]][-1].finish_reason == "error"
    assert "sampling failed: TypeError" in outputs[ids[1]][-1].error
    assert tokens_of(outputs[ids[1]]) == generate(model, [1, 2, 3], params[1]).tokens[:1]
    assert engine.stats()["surplus_tokens"] == 0  # it was refused a token, and did not leave one
    for index in (0, 2):
        assert tokens_of(outputs[ids[index]]) == generate(model, [1, 2, 3], params[index]).tokens


@pytest.mark.parametrize("where", ["keep", "read"])
def test_a_device_that_is_lost_fails_every_request_and_not_the_engine(where):
    class Lost(OverlappedRunner):
        def keep(self, found):
            if where == "keep":
                raise RuntimeError("device lost")
            super().keep(found)

            def read():
                raise RuntimeError("device lost")

            return read

    engine = OverlappedEngine(tiny_model(), runner=Lost(tiny_model(), 20, 4))
    for id in "ab":
        engine.add([1], GREEDY, id=id)
    outputs = run(engine)
    for id in "ab":
        assert [output.finish_reason for output in outputs[id]] == ["error"]
        assert "sampling failed: RuntimeError: device lost" in outputs[id][0].error
    assert engine.requests == {}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_an_abort_at_any_moment_frees_the_memory_at_once_and_is_reported(steps):
    """Waiting (0 steps), amid its prompt in flight (1, 2), about to decode (3), decoding (6)."""
    model = tiny_model()
    engine = engine_of(num_blocks=20, max_batch=2, token_budget=6)
    engine.add([5, 6, 7], GREEDY, id="other")
    engine.add(list(range(12)), GREEDY, id="given up")
    outputs = [output for _ in range(steps) for output in engine.step()]
    held = len(engine.manager.sequences["other"].blocks) if steps else 0
    assert engine.abort("given up")
    assert engine.manager.num_used == held
    rest = run(engine)
    assert not engine.abort("given up")
    assert [output.finish_reason for output in rest["given up"]] == ["abort"]
    assert (
        tokens_of([o for o in outputs if o.id == "other"] + rest["other"]) == generate(model, [5, 6, 7], GREEDY).tokens
    )


def test_what_cannot_be_overlapped_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="drafts cannot be overlapped"):
        OverlappedEngine(model, draft_model=model)
    with pytest.raises(ValueError, match="log probabilities cannot be overlapped"):
        scored(OverlappedEngine)(model)
    with pytest.raises(TypeError, match="needs an OverlappedRunner, got a ModelRunner"):
        OverlappedEngine(model, runner=ModelRunner(model, 20))
    with pytest.raises(ValueError, match="scheduler must be one of continuous, static, got 'none'"):
        OverlappedEngine(model, scheduler="none")


# ---- the rest of an engine -------------------------------------------------------------------------------------------


def test_a_stream_gives_tokens_as_they_come_and_stopping_it_aborts_the_request():
    model, engine = tiny_model(), engine_of()
    expected = generate(model, [1, 2], GREEDY).tokens
    one, two = engine.stream([1, 2], GREEDY), engine.stream([3], GREEDY)
    assert [next(one) for _ in range(3)] == expected[:3]
    assert engine.stats()["steps"] == 4  # one ahead
    assert next(two) == generate(model, [3], GREEDY).tokens[0]
    two.close()
    assert len(engine.requests) == 1
    assert [*one] == expected[3:]
    assert engine.manager.num_used == 0
    with pytest.raises(RuntimeError, match="failed: the model failed: ArithmeticError: injected"):
        list(OverlappedEngine(model, runner=Faulty("raises", "request-1", 0)).stream([60]))


def test_a_common_beginning_is_computed_once():
    model, beginning = tiny_model(), list(range(40))
    own = SamplingParams(max_new_tokens=3, ignore_eos=True)
    prompts = [[*beginning, number] for number in range(4)]
    engine = engine_of(block_size=8, max_batch=4)
    engine.generate(prompts[:1], own)
    assert engine.generate(prompts[1:], own) == [generate(model, prompt, own) for prompt in prompts[1:]]
    stats = engine.stats()
    assert (stats["cached_tokens"], stats["computed_tokens"]) == (3 * 40, 41 + 3 + 4 * 2)


def test_times_and_history_say_what_happened():
    ticks = iter(range(10_000))
    engine = engine_of(num_blocks=30, clock=lambda: next(ticks))
    own = SamplingParams(max_new_tokens=3, ignore_eos=True)
    engine.add([1, 2, 3, 4, 5], own, id="a", arrival=-1)
    request = engine.requests["a"]
    assert engine.step() == []
    engine.add([6], own, id="b")
    while engine.has_work:
        engine.step()
    steps = engine.history
    assert [step.tokens for step in steps] == [{"a": 5}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1}]
    assert [step.finished for step in steps] == [(), (), ("a",), ("b",)]
    assert [step.used + step.free for step in steps] == [30] * 4
    assert all(one.start < two.start < one.end < two.end for one, two in zip(steps, list(steps)[1:], strict=False))
    assert request.arrival < request.first_scheduled < request.first_token
    assert request.token_times == sorted(request.token_times) and request.token_times[-1] <= request.finished
    stats = engine.stats()
    assert (stats["steps"], stats["computed_tokens"], stats["generated_tokens"], stats["length"]) == (4, 10, 6, 2)


# ---- the gap ---------------------------------------------------------------------------------------------------------


def simulated(kind, host, device, steps=10, **params):
    """An engine that has served two requests on the simulated device."""
    clock = VirtualClock()
    runner = SimulatedRunner(tiny_model(), 40, 4, clock=clock, host_seconds=host, device_seconds=device)
    engine = kind(tiny_model(), runner=runner, clock=clock)
    own = SamplingParams(max_new_tokens=steps, ignore_eos=True, **params)
    assert engine.generate([[3, 4, 5], [6]], own) == [
        generate(tiny_model(), prompt, own) for prompt in ([3, 4, 5], [6])
    ]
    return engine


@pytest.mark.parametrize(("host", "device"), [(2.0, 5.0), (5.0, 2.0), (3.0, 3.0), (0.0, 1.0)])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_k": 5}])
def test_a_step_takes_the_longer_of_host_and_device_instead_of_their_sum(host, device, params):
    plain, overlapped = (simulated(kind, host, device, **params) for kind in (Engine, OverlappedEngine))
    assert plain.clock() == 10 * (host + device)
    assert overlapped.clock() == host + 9 * max(host, device) + device
    assert device_gaps(plain.runner.times) == [host] * 9
    assert device_gaps(overlapped.runner.times) == [max(0.0, host - device)] * 9
    assert waiting_share(plain.runner.times) == pytest.approx(9 * host / (9 * host + 10 * device))
    late = max(0.0, host - device)
    assert waiting_share(overlapped.runner.times) == pytest.approx(9 * late / (9 * late + 10 * device))
    assert len(overlapped.history) == len(plain.history) == 10


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}])
def test_nobody_waits_for_the_device_between_a_launch_and_the_next(params):
    """Who asks for a value of a tensor on the device waits for all that is launched: the plain engine, in each step."""
    assert simulated(OverlappedEngine, 1.0, 2.0, **params).runner.synchronized == 0
    assert simulated(Engine, 1.0, 2.0, **params).runner.synchronized >= 10


@pytest.mark.parametrize("ask", [torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.max, torch.nonzero])
def test_the_simulated_device_notices_who_asks_for_values(ask):
    clock = VirtualClock()
    runner = SimulatedRunner(tiny_model(), 20, 4, clock=clock, host_seconds=1.0, device_seconds=3.0)
    engine = Engine(tiny_model(), runner=runner)
    engine.add([3, 4], GREEDY)
    logits, _ = engine._run(engine.scheduler.schedule())
    assert clock() == 1.0
    result = ask(logits * 2)
    assert clock() == (1.0 if ask is torch.Tensor.max else 4.0)
    assert ask is not torch.Tensor.max or (bool(result > 0) in (True, False) and clock() == 4.0)


def test_seconds_may_depend_on_the_step_and_a_share_needs_one():
    clock = VirtualClock()
    host, device = (lambda step: len(step.chunks)), (lambda step: step.num_tokens)
    runner = SimulatedRunner(tiny_model(), 20, 4, clock=clock, host_seconds=host, device_seconds=device)
    engine = Engine(tiny_model(), runner=runner, clock=clock)
    engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert runner.times == [StepTimes(0.0, 1.0, 1.0, 4.0), StepTimes(4.0, 5.0, 5.0, 6.0)]
    assert waiting_share(runner.times) == 1 / 5
    with pytest.raises(ValueError, match="without a step"):
        waiting_share([])


def test_on_the_device_of_this_machine_the_host_never_waits_before_a_launch():
    """On a GPU every call that waits for the device raises meanwhile; on a CPU there is nothing to wait for."""
    from serving_runs import tiny_model as sixteen

    model = sixteen()
    prompts = [[3, 4], [5], [6, 7, 8]]
    params = [
        SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=t, top_k=k, top_p=p)
        for t, k, p in ((0.0, 0, 1.0), (0.9, 0, 1.0), (0.9, 5, 0.9))
    ]

    class Strict(OverlappedEngine):
        strict, launches = False, 0

        def _launch(self, landing):
            self.launches += 1
            if self.strict and runtime.DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                return super()._launch(landing)
            finally:
                if runtime.DEVICE.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")

    engine = Strict(model, num_blocks=40, block_size=4)
    first = engine.generate(prompts, params)  # compiles kernels and records graphs
    Strict.strict = True
    assert (
        engine.generate(prompts, params)
        == first
        == Engine(model, num_blocks=40, block_size=4).generate(prompts, params)
    )
    assert engine.launches > 16
