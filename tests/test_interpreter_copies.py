"""In a GPU session a launch of few elements far apart copies the elements, not the gigabytes between them."""

from __future__ import annotations

import pytest
from test_kernel_profile_interpreted import child

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def results() -> dict:
    return child(
        """
        from utils.interpreter import copies

        # a tensor that pretends to be on a GPU; a host tensor is its own copy on the host
        copies._elsewhere = lambda tensor: True
        torch.UntypedStorage.cpu = lambda self: self
        copies.LARGE = 2**20
        reserved = []
        reserve = copies._reserve
        copies._reserve = lambda tensors: reserved.append(len(tensors)) or reserve(tensors)

        def far(values, stride):
            home = torch.full(((len(values) - 1) * stride + values[0].numel(),), float("nan"))
            return home.as_strided(values.shape, (stride, 1)).copy_(values)

        result = {}
        x = torch.arange(12.0).reshape(3, 4)
        rows, out = far(x, 2**20), far(torch.zeros(3, 4), 2**20)
        flat = torch.as_strided(rows, (2 * 2**20 + 4,), (1,))
        with profile_kernel() as profile:
            y = ek.softmax(rows)
        result["softmax"] = torch.allclose(y, x.softmax(1)) and torch.equal(rows, x)
        result["findings"] = [str(finding) for finding in profile.findings]
        result["reserved"] = list(reserved)

        with profile_kernel() as profile:
            ek.copy(rows[0], out=out[2])
        result["copied"] = torch.equal(out[2], x[0]) and bool((out[:2] == 0).all())
        result["gap untouched"] = bool(flat[4:2**20].isnan().all())

        expanded = far(x, 2**20)[1:2].expand(5, 4)
        with profile_kernel() as profile:
            y = ek.softmax(expanded)
        result["expanded"] = bool(torch.allclose(y, x[1].softmax(0).expand(5, 4)))

        before = len(reserved)
        dense = torch.randn(600, 600)
        with profile_kernel() as profile:
            ek.gelu(dense)
        result["dense"] = len(reserved) - before
        """
    )


def test_a_sparse_argument_is_read_and_left_as_it_was(results):
    assert results["softmax"] and results["findings"] == []
    assert results["reserved"] == [1]


def test_what_a_kernel_writes_comes_back_and_gaps_stay_as_they_are(results):
    assert results["copied"] and results["gap untouched"]


def test_rows_that_repeat_are_copied_once(results):
    assert results["expanded"]


def test_a_dense_allocation_is_left_to_upstream(results):
    assert results["dense"] == 0
