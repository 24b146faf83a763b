"""What a student's answer is held against: numbers, tensors, memory traffic, forbidden shortcuts, speed.

To change a check of a kernel, in the order in which it runs (``kernel``):

- which cases are tried: ``cases``; how one runs: ``stage``, ``trials``
- what is forbidden: ``forbid`` (operators), ``library_use`` and ``forbidden_modules`` (imports)
- values: ``tensors``; the map of tiles in a message: ``tiling``
- accesses out of bounds, races and bytes: ``traffic``, ``launches``; memory that nobody wrote: ``uninitialized``
- whether the kernels compile, and how a GPU rounds their products: ``compiled``; which cases a GPU runs: ``gpu_cases``
- time on a GPU: ``speed``
- the words: ``symptoms`` (likely causes in every exercise), ``diagnoses`` (rules of an exercise's own),
  ``explanations`` (the message as a whole)

A check of functions that return numbers is in ``numbers``, with ``question`` and ``forms``; one that runs on several
ranks is in ``ranks``. What all share is in ``core``: ``Exercise``, seeds, the layout of a message. ``hidden`` draws the
class grader's cases; ``answers`` are what tests hold checks to.
"""

import utils.runtime  # decides where kernels run, before anything here imports Triton
