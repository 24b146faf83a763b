"""Right and wrong answers to the exercises of lab 6, for the tests of the checks and of the grader; never released."""
