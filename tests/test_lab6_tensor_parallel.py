"""The engine over a model that is cut over ranks: the tokens of one process, and an error wherever a rank fails.

Each world size is launched once and runs all cases; the tests read what the ranks brought back.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from lab6_tensor_parallel_runs import (
    CUT_FAMILIES,
    LONG_PARAMS,
    MESSAGE_SIZES,
    PARAMS,
    PROMPT,
    RUNNERS,
    SMALL_POOL,
    Found,
    error_of,
    everything,
    many_heads,
    workloads,
)
from serving_runs import tiny_model as model_of_family
from slow_machine_launch import launch, once
from token_identity import tiny_model

from solutions.lab5_serving import Engine
from solutions.lab6_frontiers import tensor_parallel_engine
from solutions.lab6_frontiers.tensor_parallel_decoder import TensorParallelDecoder, shard, share_of
from solutions.lab6_frontiers.tensor_parallel_engine import RankFailed, TensorParallelEngine
from utils.serving import MODELS, Decoder, SamplingParams, generate, load_model, load_tokenizer
from utils.serving.worker import Unavailable
from utils.transformer_math import tensor_parallel_step_bytes

ROOT = Path(__file__).resolve().parent.parent
SEEDS = [1, 3, 5, 7, 8, 9]
TEXTS = ["It is a truth universally acknowledged,", "It is a truth", "In the beginning", "She was"]


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODELS / "target")
    return [tokenizer.encode(text) for text in TEXTS]


@once
def on(world_size: int) -> list[Found]:
    """What the ranks of one launch brought back."""
    return launch(everything, SEEDS, prompts(), world_size=world_size)


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return on(2)


# ---- the decoder -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT_FAMILIES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_of_a_prompt_and_of_a_token_are_those_of_the_whole_model(found, family, runner):
    for rank in found:
        assert max(rank.steps[family, runner].differences) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT_FAMILIES)
@pytest.mark.parametrize("runner", ["plain", "fused"])
def test_a_step_sends_the_bytes_of_the_formula(found, family, runner):
    config = model_of_family(family).config
    sizes = {"ranks": 2, "hidden": config.hidden_size, "layers": config.num_layers, "element_size": 4}
    for rank in found:
        prefill, decode = rank.steps[family, runner].logs
        for log, tokens in ((prefill, 14), (decode, 2)):
            assert log.count() == log.count("all_reduce") == 2 * config.num_layers
            # 12 of the 14 tokens of the prompts want no logits: the fused decoder leaves them out of its last sum
            left_out = 12 * config.hidden_size * 4 if runner == "fused" and tokens == 14 else 0
            assert log.sent_bytes() == tensor_parallel_step_bytes(tokens, **sizes) - left_out


@pytest.mark.slow
def test_a_rank_holds_half_of_the_matrices_and_of_the_cache(found):
    for rank in found:
        for memory in (*rank.memory.values(), rank.shipped_model):
            assert 2 * memory.matrices[0] == memory.matrices[1]
            assert 2 * memory.cache[0] == memory.cache[1]
            assert memory.parameters[0] == memory.parameters[1]
        assert rank.unchanged


def test_sizes_that_do_not_divide_are_named():
    config = tiny_model().config
    assert (share_of(config, 2).num_heads, share_of(config, 2).num_kv_heads) == (2, 1)
    with pytest.raises(
        ValueError,
        match=r"4 ranks need a multiple of 4 of each of num_heads, num_kv_heads, intermediate_size, "
        r"got num_kv_heads = 2$",
    ):
        share_of(config, 4)
    with pytest.raises(ValueError, match=r"got num_heads = 4, num_kv_heads = 2, intermediate_size = 64$"):
        share_of(config, 3)
    with pytest.raises(ValueError, match=r"got intermediate_size = 65$"):
        share_of(replace(config, intermediate_size=65), 2)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        share_of(config, 0)


def test_on_one_rank_a_cut_decoder_is_the_whole_one(alone):
    model = tiny_model()
    cut = shard(model)
    assert isinstance(cut, TensorParallelDecoder) and shard(cut) is cut and cut.config == model.config
    assert generate(cut, PROMPT, PARAMS) == generate(model, PROMPT, PARAMS)
    with pytest.raises(ValueError, match="cut over another group"):
        shard(cut, dist.new_group([0]))


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_workloads_get_their_unbatched_decode_and_all_ranks_take_the_same_steps(found):
    """Pools as small as one request, chunks, aborts, shared beginnings, sampled and greedy."""
    counts = Counter()
    for seed in SEEDS:
        first, *others = (rank.played[seed] for rank in found)
        assert len(first.steps) > 0 and all(other.steps == first.steps for other in others), f"seed {seed}"
        counts += first.counts
    for name in ("preemptions", "cached_tokens", "abort", "stop", "refused"):  # the sample covers what it is for
        assert counts[name] > 0, name


@pytest.mark.thorough
@pytest.mark.parametrize("fifty", range(20))
def test_a_thousand_random_workloads_get_their_unbatched_decode(fifty):
    first, second = launch(workloads, [*range(50 * fifty, 50 * fifty + 50)], world_size=2)
    assert len(first) == 50 and all(second[seed].steps == first[seed].steps for seed in first)


@pytest.mark.thorough
def test_random_workloads_on_four_ranks_get_their_unbatched_decode():
    results = launch(workloads, SEEDS, world_size=4)
    for seed in SEEDS:
        assert all(each[seed].steps == results[0][seed].steps for each in results)
    assert many_heads().config.num_kv_heads == 4


@pytest.mark.slow
def test_the_shipped_model_says_what_the_engine_says_in_a_small_pool(found):
    model = load_model(MODELS / "target", dtype="float32")
    assert found[0].shipped == Engine(model, **SMALL_POOL).generate(prompts(), PARAMS)


@pytest.mark.slow
def test_the_first_rank_chooses_whatever_logits_the_others_have(found):
    ends = [(reason, output) for _, reason, _, output in found[0].negated]
    expected = [generate(tiny_model(), prompt, PARAMS) for prompt in ([3, 4], [5])]
    assert ends == [(each.finish_reason, each.tokens) for each in expected]


@pytest.mark.slow
def test_a_request_that_cannot_get_a_token_fails_alone_on_all_ranks(found):
    reasons = {id: (reason, error) for id, reason, error, _ in found[0].nan[0]}
    assert reasons["request-2"] == ("error", "the model's logits are not finite")
    assert {reasons["request-1"][0], reasons["request-3"][0]} <= {"stop", "length"}
    assert found[0].nan[1] == found[1].nan[1] and len(found[0].nan[1]) > 1


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_sends_two_messages_a_step_beside_the_bytes_of_the_formula(found):
    config = tiny_model().config
    for rank in found:
        tokens, log = rank.counted
        assert tokens == [14, 2, 1, 1]
        per_token = tensor_parallel_step_bytes(1, 2, config.hidden_size, config.num_layers, element_size=4)
        assert log.sent_bytes("all_reduce") == sum(tokens) * per_token
        assert log.count("all_reduce") == 2 * config.num_layers * len(tokens)
        assert log.count("broadcast") == 2 * len(tokens) + 1  # what arrives, the tokens; and the end
        assert log.count() == log.count("all_reduce") + log.count("broadcast")


@pytest.mark.slow
def test_the_rank_with_the_least_memory_says_how_many_blocks_there_are(found):
    assert [rank.blocks for rank in found] == [39, 39]


@pytest.mark.slow
def test_messages_of_any_length_are_heard_whole(found):
    assert found[0].heard == [] and found[1].heard == [(size, b"x" * size) for size in MESSAGE_SIZES]


@pytest.mark.slow
def test_each_rank_is_told_what_it_is_not_asked_for(found):
    first, second = (rank.misused for rank in found)
    for said in (first, second):
        assert said["settings"] == (
            "ValueError: every rank needs the same token_budget, got 64 on rank 0 and 65 on rank 1"
        )
        assert said["other settings"] == (
            "ValueError: every rank needs the same prefix_caching, got None on rank 0 and False on rank 1"
        )
        assert said["whole"] == "TypeError: the runner takes what shard(model, group) returns, got a Decoder"
    assert first["follow"].startswith("RuntimeError: the other ranks follow rank 0, and this is rank 0")
    assert first["prompt"] == "ValueError: prompt token 99 is outside the vocabulary of 61"
    for name in ("add", "abort", "step"):
        assert second[name] == f"RuntimeError: rank 0 is asked for {name}(), this is rank 1: call follow() here"
    assert (first["closed"], first["aborted"]) == ("RankFailed: the engine has been closed", "False")


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_model_that_fails_on_one_rank_ends_the_engine_on_both(found, failing):
    """The rank that failed says so; the other one waits in an all-reduce, and no longer than the group's timeout."""
    for rank, each in enumerate(found):
        said = each.failing[failing]
        assert said.startswith(f"RankFailed: rank {rank} of 2 cannot go on: ")
        if rank == failing:
            assert said.endswith("ArithmeticError: injected")
        else:
            assert re.search("timed? ?out", said, re.IGNORECASE), said
    said = found[0].deaf  # rank 0 says what arrives, and nobody listens
    assert said.startswith("RankFailed: rank 0 of 2 cannot go on: ") and re.search("timed? ?out", said, re.IGNORECASE)
    assert issubclass(RankFailed, Unavailable)  # a server asks the engine no more


# ---- processes that end ----------------------------------------------------------------------------------------------


def dying(rank: int, dies: int, folder: str) -> None:
    """A rank of two; one of them is killed in the third step, the other writes down what it is told and when."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    engine = TensorParallelEngine(tiny_model(), num_blocks=30)
    original, steps = engine.runner.run, []

    def run(*arguments):
        steps.append(time.monotonic())
        if len(steps) == 3 and rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    engine.runner.run = run
    said = error_of(lambda: engine.generate([PROMPT], LONG_PARAMS) if engine.leads else engine.follow())
    Path(folder, "said").write_text(f"{time.monotonic() - steps[-1]} {said}")
    os._exit(0)  # its peer is gone: there is nothing to take leave of


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_rank_that_is_killed_ends_the_engine_of_the_other_before_the_groups_timeout(tmp_path, dies):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=dying, args=(rank, dies, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert ranks[dies].exitcode == -signal.SIGKILL and ranks[1 - dies].exitcode == 0
    seconds, said = (tmp_path / "said").read_text().split(" ", 1)
    assert said.startswith(f"RankFailed: rank {1 - dies} of 2 cannot go on: ") and float(seconds) < 30


@pytest.mark.thorough
def test_the_recipe_in_the_modules_text_runs_under_torchrun(tmp_path):
    text = tensor_parallel_engine.__doc__.partition("::\n")[2].partition("\nOn GPUs")[0]
    script = tmp_path / "serve.py"
    script.write_text("".join(line.removeprefix("    ") + "\n" for line in text.splitlines()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    model: Decoder = load_model(MODELS / "target", dtype="float32")
    assert run.stdout.strip() == str(generate(model, [5, 6, 7], SamplingParams(max_new_tokens=8)).tokens)
