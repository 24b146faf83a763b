"""Every request's fate is counted once, under its own reason, and `/metrics` says so in Prometheus' text form."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.scripted_engine import Scripted
from utils.serving import MODELS, load_tokenizer
from utils.serving.fates import Fate, Ledger
from utils.serving.prometheus import CONTENT_TYPE, Histogram, Metric, exposition
from utils.serving.server import create_app, serving


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODELS / "draft")


def scraped(url):
    """All samples of a server's metrics, by name and labels, read by Prometheus' own parser."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"] == CONTENT_TYPE
    families = list(text_string_to_metric_families(answer.text))
    assert len({f.name for f in families}) == len(families) and all(f.documentation for f in families)
    assert {f.type for f in families} == {"counter", "gauge", "histogram"}
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def fates(url):
    samples = scraped(url)
    return {name[1]: int(count) for name, count in samples.items() if name[0] == "mlf_requests_total" and count}


# ---- the text form ----


def test_prometheus_reads_labels_help_and_numbers_back_as_they_were():
    odd = 'a "quoted" \\ back\nslash'
    counter = Metric("things_total", odd, label="kind", values={odd: 3, "x": 1e-9})
    gauge, empty = Metric("size", "Size", "gauge", values={"": 2.5}), Metric("nothing_total", "None yet")
    families = {f.name: f for f in text_string_to_metric_families(exposition([counter, gauge, empty]))}
    assert families["things"].documentation == odd
    assert {s.labels["kind"]: s.value for s in families["things"].samples} == {odd: 3, "x": 1e-9}
    assert [s.value for s in families["size"].samples] == [2.5]
    assert [s.value for s in families["nothing"].samples] == [0]


def test_a_histograms_buckets_are_cumulative_and_a_bound_belongs_to_its_bucket():
    histogram = Histogram("wait_seconds", "Waiting", (0.1, 1.0))
    for value in (0.05, 0.1, 0.2, 1.0, 7.0):
        histogram.observe(value)
    (family,) = text_string_to_metric_families(exposition([histogram]))
    assert family.type == "histogram"
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert buckets == {"0.1": 2, "1.0": 4, "+Inf": 5}
    rest = {s.name: s.value for s in family.samples if "le" not in s.labels}
    assert rest == {"wait_seconds_sum": pytest.approx(8.35), "wait_seconds_count": 5}


# ---- the ledger ----


def test_a_request_ends_once_whatever_is_said_of_it_later():
    ledger = Ledger()
    fates = ledger.open()
    fates.split(3)
    assert ledger.in_flight == 3
    fates.tokens(0, 2)
    fates.end(0, Fate.LENGTH)
    fates.end(0, Fate.FAILED)
    fates.tokens(0, 5)  # too late
    fates.end(1, Fate.STOP_STRING)
    fates.end_all(Fate.CLIENT_GONE)
    fates.end_all(Fate.SHUTDOWN)
    assert {k: v for k, v in ledger.ended.values.items() if v} == {"length": 1, "stop_string": 1, "client_gone": 1}
    assert ledger.in_flight == 0 and ledger.output_tokens.values == {"": 2}
    assert (ledger.ttft.count, ledger.tpot.count, ledger.latency.count) == (1, 1, 2)


# ---- a server ----


def post(url, path="completions", **body):
    return httpx.post(f"{url}/v1/{path}", json={"model": "m", "prompt": "A", **body}, timeout=20)


class EndsItself(Scripted):
    """Its requests end by an end of text where the script is over before their length."""

    def step(self):
        asked = {id: request.params.max_new_tokens for id, request in self.requests.items()}
        outputs = super().step()
        for output in outputs:
            if output.finish_reason == "length" and asked[output.id] > len(self.text):
                output.finish_reason = "stop"
        return outputs


@pytest.mark.slow
def test_each_kind_of_end_has_its_own_count(tokenizer):
    text = tokenizer.encode(" one two three four")
    poison = tokenizer.encode("X")[:1]
    engine = EndsItself(text, most=4, poisoned=poison)
    message = [{"role": "user", "content": "A"}]
    asked = [
        ({"max_tokens": 2}, 200, {"length": 1}),
        ({"max_tokens": 50}, 200, {"end_token": 1}),
        ({"max_tokens": 50, "stop": "two"}, 200, {"stop_string": 1}),
        ({"max_tokens": 50, "stop": "o th", "stream": True, "n": 2}, 200, {"stop_string": 2}),
        ({"prompt": ["A", "B"], "n": 2, "max_tokens": 1}, 200, {"length": 4}),
        ({"prompt": "X"}, 500, {"failed": 1}),
        ({"prompt": ["X", "A"], "max_tokens": 3}, 500, {"failed": 2}),  # the client gets neither
        ({"prompt": "X", "stream": True}, 200, {"failed": 1}),
        ({"n": 5}, 429, {"full": 5}),
        ({"temperature": -1, "n": 3}, 400, {"invalid": 1}),
        ({"prompt": [0], "n": 3}, 400, {"invalid": 3}),
        ({"model": "other"}, 404, {"invalid": 1}),
        ({"logprobs": 1}, 400, {"invalid": 1}),
        ({"path": "chat/completions", "messages": message, "prompt": None}, 400, {"invalid": 1}),
    ]
    total = dict.fromkeys(Fate, 0)
    with serving(create_app(engine, tokenizer, name="m")) as url:
        before = {}
        for body, status, counts in asked:
            answer = post(url, **body)
            assert answer.status_code == status, (body, answer.text)
            after = fates(url)
            assert {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)} == counts, body
            before = after
            total |= {k: total[k] + n for k, n in counts.items()}
        samples = scraped(url)
        health = httpx.get(f"{url}/health").json()
    assert samples["mlf_requests_received_total",] == sum(total.values()) and samples["mlf_requests_in_flight",] == 0
    assert samples["mlf_engine_running",] == 0
    served = total["length"] + total["end_token"] + total["stop_string"]
    assert samples["mlf_request_seconds_count",] == samples["mlf_time_to_first_token_seconds_count",] - 4 == served
    ends = {"stop": total["end_token"] + total["stop_string"], "length": total["length"], "abort": 0, "error": 4}
    assert {k: health[k] for k in ends} == ends


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_counts_as_gone(tokenizer, stream):
    engine = Scripted([5] * 3000, free_running=False, patience=0.01)
    with serving(create_app(engine, tokenizer, name="m")) as url:
        body = {"model": "m", "prompt": "A", "max_tokens": 3000, "n": 2, "stream": stream}
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=body, timeout=0.2)
        assert engine.someone_gone.wait(20)
        assert fates(url) == {"client_gone": 2}
        samples = scraped(url)
        assert samples["mlf_requests_in_flight",] == 0 and samples["mlf_request_seconds_count",] == 0
    assert not engine.requests


@pytest.mark.slow
def test_in_a_crowd_every_request_is_counted_once(tokenizer):
    engine = Scripted(tokenizer.encode(" and the whale"), most=6, poisoned=tokenizer.encode("X")[:1])
    lock, met = threading.Lock(), []
    bodies = [
        {"max_tokens": 2},
        {"max_tokens": 9, "stop": "whale"},
        {"prompt": "X"},
        {"temperature": 9},
        {"n": 3, "max_tokens": 1},
        {"max_tokens": 2, "stream": True},
    ]

    def client(number):
        body = bodies[number % len(bodies)]
        answer = post(url, **body)
        with lock:
            met.append(
                (answer.status_code, 1 if answer.status_code == 400 else body.get("n", 1), "error" in answer.text)
            )

    with serving(create_app(engine, tokenizer, name="m")) as url, ThreadPoolExecutor(12) as pool:
        list(pool.map(client, range(60)))
        counts, samples = fates(url), scraped(url)
    assert samples["mlf_requests_in_flight",] == 0
    assert samples["mlf_requests_received_total",] == sum(counts.values()) == sum(n for _, n, _ in met)
    assert counts["invalid"] == 10 and counts.get("full", 0) == sum(n for status, n, _ in met if status == 429)
    assert counts["failed"] == sum(n for status, n, _ in met if status == 500)
    good = sum(n for status, n, wrong in met if status == 200 and not wrong)
    assert counts["length"] + counts.get("stop_string", 0) == good > 0
