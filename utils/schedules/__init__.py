"""Pipeline schedules: in which order stages work, and when, with idle time and activations in flight.

>>> simulate(one_f_one_b(stages=4, micro_batches=8)).bubble  # (p - 1)/m
0.375
"""

from utils.schedules.orders import gpipe, interleaved, naive, one_f_one_b, zero_bubble
from utils.schedules.schedule import KINDS, Action, Schedule, from_orders
from utils.schedules.simulate import Deadlock, Timeline, Work, simulate
