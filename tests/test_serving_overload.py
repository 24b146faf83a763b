"""A few seconds of the overload that ``python -m tests.overload`` keeps up for five minutes."""

import pytest

from tests import overload


@pytest.mark.slow
def test_under_ten_times_the_load_every_request_gets_its_answer_or_a_clear_error_and_nothing_leaks():
    outcome = overload.run(2.0, warm_up=1.0, tokens=24, seed=1)
    print(outcome)
    assert outcome.wrong == [] and outcome.leaks == []
    assert outcome.answered > 0 and sum(met.get("refused", 0) for met in outcome.met.values()) > outcome.answered
    assert {"told: invalid", "refused"} <= {what for met in outcome.met.values() for what in met}
