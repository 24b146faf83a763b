"""What stands between HTTP and the engine, without HTTP: options, text up to a stop text, the engine's thread."""

import asyncio
import random

import pytest

from tests.scripted_engine import Scripted
from utils.serving import MODELS, SamplingParams, load_tokenizer
from utils.serving.openai_api import AnswerText
from utils.serving.worker import Busy, EngineWorker, Unavailable


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODELS / "draft")


@pytest.mark.parametrize("seed", range(20))
def test_text_never_shows_a_stop_text_or_a_part_that_became_one(tokenizer, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab ") for _ in range(60))
    stops = ["".join(rng.choice("ab ") for _ in range(rng.randint(2, 6))) for _ in range(rng.randint(0, 3))]
    tokens = tokenizer.encode(text)
    answer, shown = AnswerText(tokenizer, stops), ""
    for i, token in enumerate(tokens):
        shown += answer.push([token], last=i == len(tokens) - 1)
    whole = tokenizer.decode(tokens)
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert shown == (whole[: min(places)] if places else whole), f"seed {seed}"
    assert answer.stopped == bool(places)


def test_the_way_to_the_engine_is_of_limited_width():
    async def crowd():
        scripted = Scripted(free_running=False)
        worker = EngineWorker(scripted, max_pending=2)
        with pytest.raises(Unavailable, match="not running"):
            await worker.submit([([5], SamplingParams())])
        worker.start()
        with pytest.raises(RuntimeError, match="started once"):
            worker.start()
        first = await worker.submit([([5], SamplingParams(max_new_tokens=2))])  # the engine now waits for a tick
        tasks = [asyncio.ensure_future(worker.submit([([5], SamplingParams())])) for _ in range(4)]
        await asyncio.sleep(0)
        assert [t.done() and isinstance(t.exception(), Busy) for t in tasks] == [False, False, True, True]
        scripted.free_running = True
        scripted.tick(3)
        assert [event.tokens async for _, event in first.events()] == [[5], [6]]
        for task in tasks[:2]:
            (await task).close()
        worker.stop()
        assert not worker.running

    asyncio.run(crowd())
    with pytest.raises(ValueError, match="max_pending must be at least 1"):
        EngineWorker(Scripted(), max_pending=0)
