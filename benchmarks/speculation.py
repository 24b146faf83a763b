"""Speculative decoding with the course's own pair: acceptance and speed over the draft's length, and when it pays.

- ``acceptance``: what the target accepts of k tokens drafted by the draft, on text that the two write together from
  the openings below, 64 sequences at a time, by way of sampling. ``accepted["i"]`` is the share of rounds in which at
  least i tokens were accepted.
- ``rounds``: the time of a round (k passes of the draft, one of the target, verification) of a batch, as a CUDA graph;
  ``ratio`` is the speed over plain decoding in the same run, tokens counted by ``acceptance``. The models' weights fit
  in the L2 cache and stay there from round to round, as in a real loop.
- ``passes``: one pass over some tokens of each sequence of a batch for models of two larger shapes with random
  weights. Whether speculation pays is a matter of these times and of the acceptance alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from benchmarks.decoding import random_model, replayed
from benchmarks.speculative_rounds import BatchCache, Rounds, prompts_of, whole_pass
from utils import runtime, timing
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import MODELS, Decoder, ModelConfig, SamplingParams, load_model, load_tokenizer

SEED = 2023
#: Beginnings of the books that the models were trained on, and of sentences that are in none of them.
OPENINGS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune,",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse,",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition,",
    "And it came to pass in those days, that there went out a decree from the king of the country,",
    "The captain walked the deck all night, and in the morning he called the men together and told them,",
    '"My dear sister," said Elizabeth, "I have been thinking of what you told me yesterday,',
    "The Lord is my shepherd; I shall not want. He maketh me to lie down in green pastures:",
)
PROMPT = 12  # tokens of each opening
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12)
WAYS: Mapping[str, SamplingParams] = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "greedy": SamplingParams(),
}
COUNTED = 64  # sequences whose acceptances are counted
MOST_ROUNDS = 256  # of each of them
BATCHES = (1, 16, 128)
#: Qwen3-8B and Qwen3-0.6B, their config.json, with as many positions as are measured.
SHAPES = {
    "8B": ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128, max_seq_len=1024, rope_theta=1e6, qk_norm=True, tied_head=False,
    ),
    "0.6B": ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, max_seq_len=1024, rope_theta=1e6, qk_norm=True, tied_head=True,
    ),
}  # fmt: skip
PASS_TOKENS = (1, 2, 3, 4, 5, 7, 9)
PASS_BATCHES = (1, 4, 16, 32, 64, 128, 256)
CONTEXT = 256


def acceptance(target: Decoder, draft: Decoder, prompts: torch.Tensor, k: int, params: SamplingParams) -> dict:
    """What is accepted of drafts of k tokens, in as many rounds as fit into a text whatever is accepted."""
    rounds = Rounds(target, draft, prompts, k, params)
    replay = replayed(rounds)  # on a GPU this runs a few rounds already
    room = (rounds.capacity - int(rounds.length.max())) // (k + 1)
    found = rounds.count(min(room, MOST_ROUNDS), replay)
    return {
        "draft_tokens": k,
        "rounds": found.numel(),
        "tokens_per_round": float(found.double().mean()) + 1,
        "accepted": {str(i + 1): float((found > i).double().mean()) for i in range(k)},
    }


def round_times(
    target: Decoder, draft: Decoder, prompts: torch.Tensor, drafts: Sequence[int], params: SamplingParams, rounds: int
) -> dict[int, timing.Timing]:
    """The time of a round of each draft length, measured together."""
    calls = {str(k): replayed(Rounds(target, draft, prompts, k, params)) for k in drafts}
    timed = timing.compare(calls, rounds=rounds, flush_l2=False)
    return {k: timed[str(k)] for k in drafts}


def passes(
    shapes: Mapping[str, ModelConfig], batches: Sequence[int], tokens: Sequence[int], context: int, rounds: int
) -> list[dict[str, Any]]:
    """The time of one pass of each shape over each number of tokens of each batch."""
    found = []
    for name, config in shapes.items():
        model = random_model(config, torch.bfloat16)
        for batch in batches:
            cache = BatchCache(config, batch, context, model.dtype)
            calls = {str(count): replayed(whole_pass(model, cache, batch, count)) for count in tokens}
            timed = timing.compare(calls, rounds=rounds)
            found += [
                {"model": name, "parameters": config.parameters, "batch": batch, "tokens": count,
                 **timed[str(count)].as_dict()}
                for count in tokens
            ]  # fmt: skip
            del calls, cache
        del model
        if runtime.HAS_GPU:
            torch.cuda.empty_cache()
    return found


SCHEMA = {
    "dtype": TEXT,
    "target": {"parameters": SIZE, "layers": SIZE},
    "draft": {"parameters": SIZE, "layers": SIZE},
    "prompt_tokens": SIZE,
    "sequences": SIZE,
    "acceptance": {
        str: [{"draft_tokens": COUNT, "rounds": SIZE, "tokens_per_round": POSITIVE, "accepted": {str: NOT_NEGATIVE}}]
    },
    "timed_way": TEXT,
    "rounds": [{"batch": SIZE, "draft_tokens": COUNT, **TIMING, "tokens_per_second": POSITIVE, **RATIO}],
    "context": SIZE,
    "passes": [{"model": TEXT, **each(SIZE, "parameters", "batch", "tokens"), **TIMING}],
}


@benchmark_cli.quiet()
@torch.no_grad()
def measure(
    quick: bool = False,
    drafts: Sequence[int] = DRAFTS,
    batches: Sequence[int] = BATCHES,
    counted: int = COUNTED,
    shapes: Mapping[str, ModelConfig] = SHAPES,
    pass_batches: Sequence[int] = PASS_BATCHES,
    pass_tokens: Sequence[int] = PASS_TOKENS,
    context: int = CONTEXT,
    pair: tuple[Decoder, Decoder] | None = None,
    rounds: int = 18,
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` takes few sizes.

    Raises:
        RuntimeError: there is no GPU here.
    """
    if quick:
        drafts, batches, pass_batches, pass_tokens, rounds = drafts[:4], batches[:2], pass_batches[:2], (1, 4), 8
    torch.manual_seed(SEED)
    target, draft = pair or (load_model(MODELS / name, device=runtime.DEVICE) for name in ("target", "draft"))
    tokenizer = load_tokenizer(MODELS / "target")
    texts = [tokenizer.encode(opening) for opening in OPENINGS]
    shares = {
        way: [acceptance(target, draft, prompts_of(texts, counted, PROMPT), k, params) for k in drafts]
        for way, params in WAYS.items()
    }
    way = next(iter(WAYS))
    yields = {each["draft_tokens"]: each["tokens_per_round"] for each in shares[way]}
    timed_rounds = []
    for batch in batches:
        timed = round_times(target, draft, prompts_of(texts, batch, PROMPT), drafts, WAYS[way], rounds)
        for k in drafts:
            gain = timing.ratio(timed[drafts[0]], timed[k]).as_dict()
            timed_rounds.append(
                {"batch": batch, "draft_tokens": k, **timed[k].as_dict(),
                 "tokens_per_second": batch * yields[k] / timed[k].median,
                 **{name: value * yields[k] / yields[drafts[0]] for name, value in gain.items()}}
            )  # fmt: skip
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": {"parameters": target.config.parameters, "layers": target.config.num_layers},
        "draft": {"parameters": draft.config.parameters, "layers": draft.config.num_layers},
        "prompt_tokens": PROMPT,
        "sequences": counted,
        "acceptance": shares,
        "timed_way": way,
        "rounds": timed_rounds,
        "context": context,
        "passes": passes(shapes, pass_batches, pass_tokens, context, rounds),
    }


def table(results: dict[str, Any]) -> str:
    """Tokens a round by way of sampling; time and speed of rounds; time of passes over those of one token."""
    drafts = [each["draft_tokens"] for each in next(iter(results["acceptance"].values()))]
    yields = [
        [way, *(f"{each['tokens_per_round']:.2f}" for each in found)] for way, found in results["acceptance"].items()
    ]
    speeds = [
        [p["batch"], p["draft_tokens"], f"{p['seconds'] * 1e6:,.0f}", f"{p['tokens_per_second']:,.0f}",
         f"{p['ratio']:.2f}"]
        for p in results["rounds"]
    ]  # fmt: skip
    one = {(p["model"], p["batch"]): p["seconds"] for p in results["passes"] if p["tokens"] == 1}
    large = [
        [p["model"], p["batch"], p["tokens"], f"{p['seconds'] * 1e3:.3f}",
         f"{p['seconds'] / one[p['model'], p['batch']]:.2f}"]
        for p in results["passes"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            benchmark_cli.text_table(["tokens a round", *(f"k = {k}" for k in drafts)], yields),
            benchmark_cli.text_table(["batch", "k", "us a round", "tokens/s", "x"], speeds),
            benchmark_cli.text_table(["model", "batch", "tokens", "ms a pass", "of one token"], large),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("speculation", measure, table, SCHEMA))
