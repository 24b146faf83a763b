"""Checks whose scenarios run on several ranks: labs 4 and 6.

``distributed_check`` is the check of an exercise, and says what went wrong; ``scenarios`` are what it plays, and what a
rank saw; ``scenario_runs`` starts the ranks, ``on_rank`` is what each of them does; ``forbid_library_calls`` refuses
PyTorch's own solutions, and ``gathers`` looks at all-gathers.
"""
