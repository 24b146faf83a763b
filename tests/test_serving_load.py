"""A standard load generator, in a process of its own, asks more of the server than it can serve."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from solutions.lab5_serving import Engine
from utils.serving import MODELS, load_model, load_tokenizer
from utils.serving.server import create_app, serving

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_locust_finds_no_failure_and_counts_as_many_requests_as_the_server(tmp_path):
    engine = Engine(
        load_model(MODELS / "draft", dtype=torch.float32), num_blocks=64, max_batch=2, max_waiting=2, history=10
    )
    app = create_app(engine, load_tokenizer(MODELS / "draft"), name="draft")
    with serving(app) as url:
        command = [sys.executable, "-m", "locust", "-f", str(TESTS / "locust_clients.py"), "--host", url, "--headless"]
        load = ["--users", "40", "--spawn-rate", "40", "--run-time", "4s", "--stop-timeout", "60"]
        ran = subprocess.run(
            [*command, *load, "--json", "--only-summary"], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        metrics = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = {(s.name, *s.labels.values()): int(s.value) for family in metrics for s in family.samples}
    entries = {entry["name"]: entry for entry in json.loads(ran.stdout)}
    asked = sum(entries[name]["num_requests"] for name in ("completions", "chat/completions"))
    assert all(entry["num_failures"] == 0 for entry in entries.values())
    fates = {name[1]: count for name, count in samples.items() if name[0] == "mlf_requests_total" and count}
    assert fates.keys() == {"length", "full"}, fates  # 40 clients for 4 places: served, or told to come again
    assert sum(fates.values()) == samples["mlf_requests_received_total",] == asked
    assert engine.manager.num_used == 0 and not engine.requests
