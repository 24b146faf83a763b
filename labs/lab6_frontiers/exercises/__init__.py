"""The exercises of lab 6: what each asks for, its check, and the hidden cases on which it is graded."""
