"""Prefill and decode on separate workers, against chunked prefill: a simulation with measured step times.

::

    fitted = fit_step_time()
    lengths = {"prompts": lognormal(4000, 0.6), "outputs": lognormal(100, 0.6)}
    workload = Workload.draw(800, arrivals=poisson(1), tokens=2, **lengths)
    apart = Disaggregated(prefill=1, decode=3, bandwidth=450e9, bytes_per_token=fitted.bytes_per_token)
    print(goodput(apart, workload, SLO(ttft=0.2, tpot=0.004), fitted.step_time), "requests/s")
"""

from .fit import Fit, Sample, fit, fit_step_time
from .goodput import SLO, Case, Outcome, goodput, request_rate, sweep
from .simulate import Arrangement, Colocated, Disaggregated, simulate
from .step_time import StepTime, Work
from .workers import Job, Worker
