"""The course's website: Sphinx pages made from the executed notebooks; ``python -m website.build`` makes it."""
