"""The exercise of lab 7: what it asks for, its check, and the hidden cases on which it is graded."""
