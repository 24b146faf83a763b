"""Prefill and decode in separate processes: the engine's own tokens, whatever is killed, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from own_processes import OwnProcesses
from parameters import thorough_but
from token_identity import tiny_model

from solutions.lab5_serving import Engine
from solutions.lab6_frontiers import handover_worker, prefill_decode
from solutions.lab6_frontiers.handover_engines import DecodeEngine, Job, PrefillEngine, slot_shape
from solutions.lab6_frontiers.prefill_decode import MOST_DEATHS, PrefillDecode
from utils.serving import MODELS, SamplingParams, generate, load_model, save_model
from utils.serving.engine_process import EngineDied


def draw_requests(rng, count, vocabulary, longest=40, most_new=40):
    """Prompts, half of them with a common beginning, and parameters: greedy and sampled, ending or not."""
    beginning = [rng.randrange(vocabulary) for _ in range(longest // 2)]
    requests = []
    for _ in range(count):
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest // 2))]
        params = SamplingParams(
            rng.randint(1, most_new), temperature=rng.choice([0.0, 0.8]), top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1000), ignore_eos=rng.random() < 0.5,
        )  # fmt: skip
        requests.append((beginning * rng.choice([0, 1]) + own, params))
    return requests


# ---- the two engines, in this process ----


def serve_apart(seed):
    """Random requests through both engines, some of them cut off and prefilled again: texts, reasons, and engines."""
    rng, model = random.Random(seed), tiny_model()
    requests = {f"r{i}": each for i, each in enumerate(draw_requests(rng, rng.randint(1, 8), 61))}
    block_size = rng.randint(1, 16)
    least = -(-max(min(len(p) + q.max_new_tokens, 96) for p, q in requests.values()) // block_size)
    settings = {"block_size": block_size, "prefix_caching": rng.random() < 0.7}
    prefill, decode = (
        cls(model, num_blocks=least + rng.randint(0, least), max_batch=batch, token_budget=batch + rng.randint(0, 30),
            **settings)
        for cls, batch in ((PrefillEngine, rng.randint(1, 4)), (DecodeEngine, rng.randint(1, 4)))
    )  # fmt: skip
    slots = {id: torch.full(slot_shape(model.config), torch.nan) for id in requests}
    output = {id: [] for id in requests}
    reasons, lost = {}, rng.sample(sorted(requests), len(requests) // 3)
    for id, (prompt, params) in requests.items():
        prefill.prefill(Job(id, prompt, [], params), slots[id])
    while prefill.has_work or decode.has_work:
        for id in decode.copy_slots():
            slots[id].fill_(torch.nan)  # nobody may read it from here on
        for engine in (prefill, decode):
            for done in engine.step():
                assert done.error is None
                prompt, params = requests[done.id]
                output[done.id] += done.new_tokens
                if done.finish_reason == "handover":
                    decode.take_over(Job(done.id, prompt, list(output[done.id]), params), slots[done.id])
                elif done.finished and done.id not in reasons:
                    reasons[done.id] = done.finish_reason
            engine.manager.check()
        if lost and lost[-1] in decode.requests and rng.random() < 0.2:
            id = lost.pop()
            decode.abort(id)
            decode._reports.clear()
            prefill.prefill(Job(id, requests[id][0], list(output[id]), requests[id][1]), slots[id])
    return requests, output, reasons, (prefill, decode)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", thorough_but([range(5, 9), range(40)], range(5, 9)))
def test_random_requests_get_their_own_tokens_from_two_engines(seeds):
    preempted = stopped = waited = 0
    for seed in seeds:
        requests, output, reasons, engines = serve_apart(seed)
        for id, (prompt, params) in requests.items():
            wanted = generate(tiny_model(), prompt, params)
            assert (output[id], reasons[id]) == (wanted.tokens, wanted.finish_reason), f"seed {seed}, request {id}"
            stopped += wanted.finish_reason == "stop"
        assert not any(engine.manager.num_used or engine.requests for engine in engines), f"seed {seed}"
        preempted += engines[1].stats()["preemptions"]
        waited += engines[0].max_batch > engines[1].max_batch
    assert preempted and stopped and waited  # all of that has been tried


def test_a_request_that_is_aborted_in_its_slot_is_reported_and_leaves_nothing():
    model = tiny_model()
    prefill, decode = PrefillEngine(model, num_blocks=16), DecodeEngine(model, num_blocks=16)
    slot = torch.zeros(slot_shape(model.config))
    prefill.prefill(Job("a", [1, 2, 3], [], SamplingParams(9, ignore_eos=True)), slot)
    (done,) = prefill.step()
    assert done.finish_reason == "handover" and len(done.new_tokens) == 1
    decode.take_over(Job("a", [1, 2, 3], done.new_tokens, SamplingParams(9, ignore_eos=True)), slot)
    assert decode.abort("a") and not decode.abort("a")
    assert [(o.id, o.finish_reason) for o in decode.step()] == [("a", "abort")]
    assert decode.copy_slots() == [] and not decode.has_work and decode.manager.num_used == 0


# ---- processes ----


def shared_names(pids):
    """Files of shared memory to which one of these processes has given a name."""
    own = tuple(f"torch_{pid}_" for pid in pids)
    return [name for name in os.listdir("/dev/shm") if name.startswith(own)] if Path("/dev/shm").is_dir() else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_model(tiny_model(), path)
    return path


@pytest.fixture(scope="module")
def server(folder):
    """One prefill worker and two decode workers of the random model; nothing of them is left at the end."""
    children = OwnProcesses()
    with PrefillDecode(folder, decode=2, num_slots=2, num_blocks=40, block_size=4, max_batch=4) as server:
        pids = {os.getpid(), *(worker.pid for worker in server.workers)}
        assert len(pids) == 4 and not shared_names(pids)
        yield server
        pids.update(worker.pid for worker in server.workers)
    left = [child for child in children() if "resource_tracker" not in " ".join(child.cmdline())]
    assert not left and not shared_names(pids)
    with pytest.raises(EngineDied, match="the workers have been closed"):
        server.add([1])
    server.close()  # a second time: nothing


def play(server, requests, happens=lambda outputs: None):
    """What requests get: tokens, reason and error by id. After each step ``happens`` sees what there is so far."""
    ids = [server.add(*request) for request in requests]
    outputs = {id: ([], None, None) for id in ids}
    while server.has_work:
        for done in server.step():
            tokens, reason, _ = outputs[done.id]
            assert reason is None, "a request is over once"
            outputs[done.id] = (tokens + done.new_tokens, done.finish_reason, done.error)
        happens(outputs)
    assert server.slots_in_use == 0
    return list(outputs.values())


def wanted(requests):
    each = [generate(tiny_model(), *request) for request in requests]
    return [(answer.tokens, answer.finish_reason, None) for answer in each]


@pytest.mark.slow
def test_processes_give_the_tokens_of_plain_generation(server):
    requests = draw_requests(random.Random(1), 12, 61)
    assert play(server, requests) == wanted(requests)
    assert server.generate(*map(list, zip(*requests, strict=True))) == [generate(tiny_model(), *r) for r in requests]
    assert server.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_every_request_is_answered_in_full_when_a_worker_is_killed(server, role):
    requests = [(prompt, SamplingParams(40, temperature=t, seed=3, ignore_eos=True))
                for t in (0.0, 0.8) for prompt, _ in draw_requests(random.Random(2), 4, 61)]  # fmt: skip
    before, killed = server.restarts, []

    def kill_one(outputs):
        worker = max((w for w in server.workers if w.role == role), key=lambda worker: worker.jobs)
        if not killed and worker.jobs and any(outputs.values()):
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    answers = play(server, requests, kill_one)
    assert answers == wanted(requests) and killed and server.restarts == before + 1
    with pytest.raises(ProcessLookupError):  # it has been waited for
        os.kill(killed[0], 0)


@pytest.mark.slow
def test_a_request_whose_workers_keep_dying_is_told_and_the_others_are_answered(server, monkeypatch):
    monkeypatch.setattr(prefill_decode, "MOST_DEATHS", 1)
    requests = [([1, 2, 3], SamplingParams(90, ignore_eos=True)), ([4, 5], SamplingParams(90, ignore_eos=True))]
    killed = []

    def kill_the_first(outputs):
        held = [
            a.worker for a in server._attempts.values() if a.entry.prompt == [1, 2, 3] and a.worker.role == "decode"
        ]
        if held and not killed:
            killed.append(held[0].pid)
            os.kill(held[0].pid, signal.SIGKILL)

    (tokens, reason, error), other = play(server, requests, kill_the_first)
    assert MOST_DEATHS > 1 and reason == "error"
    assert error == "a decode worker has died (SIGKILL); workers that had this request: 1 died, given up"
    assert tokens == generate(tiny_model(), *requests[0]).tokens[: len(tokens)] and other == wanted(requests)[1]


@pytest.mark.slow
def test_a_request_that_is_given_up_frees_its_slot_wherever_it_is(server):
    requests = [(prompt, SamplingParams(30, ignore_eos=True)) for prompt, _ in draw_requests(random.Random(4), 9, 61)]
    rng = random.Random(5)

    def give_up(outputs):
        open_ids = [id for id, (_, reason, _) in list(outputs.items())[:5] if reason is None]
        if open_ids and rng.random() < 0.3:
            assert server.abort(open_ids[-1])

    answers = play(server, requests, give_up)
    for (tokens, reason, _), (all_tokens, whole, _) in zip(answers, wanted(requests), strict=True):
        assert reason in ("abort", whole) and tokens == all_tokens[: len(tokens)]
    assert {reason for _, reason, _ in answers} == {"abort", "length"} and not server.abort("nobody")


@pytest.mark.slow
def test_what_can_never_be_served_is_refused_at_once(server):
    with pytest.raises(ValueError, match="prompt token 61 is outside the vocabulary of 61"):
        server.add([61])
    with pytest.raises(ValueError, match="at least one token"):
        server.generate([[1], []])
    server.add([1], SamplingParams(1), id="mine")
    with pytest.raises(ValueError, match="'mine' is not finished yet"):
        server.add([2], id="mine")
    assert [(o.id, o.finish_reason) for o in server.step()] == [("mine", "length")] and not server.has_work


def test_numbers_below_one_and_folders_without_a_model_are_refused(folder, tmp_path):
    for name in ("prefill", "decode", "num_slots", "threads"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            PrefillDecode(folder, **{name: 0})
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        PrefillDecode(tmp_path)


@pytest.mark.slow
def test_workers_that_cannot_start_are_said_to_have_died_and_none_is_left(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())  # and no weights
    children = OwnProcesses()
    with pytest.raises(RuntimeError, match=r"worker has died \(exit status 1\) before it was ready"):
        PrefillDecode(tmp_path, num_blocks=8)
    assert not [child for child in children() if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.mark.thorough
def test_the_shipped_model_gives_the_engines_tokens():
    requests = draw_requests(random.Random(6), 6, 4096, longest=60, most_new=12)
    prompts, params = map(list, zip(*requests, strict=True))
    model = load_model(MODELS / "target", dtype=torch.float32)
    expected = Engine(model, num_blocks=64).generate(prompts, params)
    with PrefillDecode(MODELS / "target", num_slots=2, num_blocks=64) as server:
        assert server.generate(prompts, params) == expected
    assert set(handover_worker.ENGINES) == {"prefill", "decode"}
