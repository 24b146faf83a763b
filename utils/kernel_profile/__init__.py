"""The course's microscope: what a Triton kernel loads, stores, multiplies, and does wrong, exactly, on any machine."""

from __future__ import annotations

from utils import runtime  # before triton: it decides between GPU and interpreter
from utils.kernel_profile.counters import SECTOR, Counters
from utils.kernel_profile.findings import Finding, OutOfBounds, Race, UninitializedRead
from utils.kernel_profile.launches import LaunchProfile
from utils.kernel_profile.profile import Profile, profile_kernel
