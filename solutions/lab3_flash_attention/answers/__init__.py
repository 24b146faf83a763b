"""Right and wrong answers to the exercises of lab 3, for the tests of the checks and of the grader; never released."""
