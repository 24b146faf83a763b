"""The picture of a GPU from above is drawn from the hardware table."""

import pytest

from utils.hardware import gpu
from utils.plots import png
from utils.plots.anatomy import chip_anatomy


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lanes"), [("H100", 128), ("T4", 64), ("P100", 64)])
def test_the_alternative_text_and_the_squares_follow_the_hardware_table(name, lanes):
    device = gpu(name)
    fig = chip_anatomy(device, lanes)
    chip, sm = fig.axes
    assert f"{device.sms} SMs" in fig.alt and f"{lanes // device.schedulers_per_sm} fp32 lanes" in fig.alt
    assert ("tensor core" in fig.alt) == device.has_tensor_cores
    assert len(chip.patches) == device.sms + 2  # each SM, the L2 cache and the memory
    parts = 3 if device.has_tensor_cores else 2  # scheduler, registers, tensor core
    assert len(sm.patches) == lanes + device.schedulers_per_sm * parts + 1
    assert png(fig).startswith(b"\x89PNG")
