"""Mutation testing of a lab's checks: each solution with one small mistake in it must be caught.

:mod:`.operators` makes the mutants of a solution's text, :mod:`.run` holds each to the exercise's check and its hidden
cases, :mod:`.report` writes what came of them. ``make mutate LAB=lab3`` does all three.
"""
