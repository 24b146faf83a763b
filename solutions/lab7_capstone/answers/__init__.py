"""Right and wrong answers to the exercise of lab 7, for the tests of the checks and of the grader; never released."""
