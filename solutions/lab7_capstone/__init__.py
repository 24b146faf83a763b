"""Lab 7, the capstone: a matrix product for Hopper whose warps have different jobs.

Edit the module beside this file; the notebook explains the exercise and checks your function.
"""

from .consumer import multiply
