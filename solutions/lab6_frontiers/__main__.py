"""Serve a model as ``python -m solutions.lab5_serving`` does, with what lecture 18 adds::

python -m solutions.lab6_frontiers --overlap --shared-prefix
python -m solutions.lab6_frontiers --draft heads --tree-nodes 32
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from solutions.lab5_serving.__main__ import command_line
from solutions.lab5_serving.__main__ import main as serve
from solutions.lab5_serving.serve import create_server

from .serve import HEADS, create_engine


def main(arguments: Sequence[str] | None = None) -> None:
    """Load a model and serve it until interrupted."""
    lab5 = command_line()
    parser = argparse.ArgumentParser(  # its draft head takes the place of a draft model
        prog=f"python -m {__package__}", description=lab5.description, parents=[lab5], conflict_handler="resolve"
    )
    parser.add_argument("--overlap", action="store_true", help="prepare a step while the device computes another")
    parser.add_argument("--shared-prefix", action="store_true", help="read what requests have in common once per step")
    parser.add_argument("--tree-nodes", type=int, default=16, help="of the tree that a head drafts (%(default)s)")
    parser.add_argument("--draft", help=f'the folder of a draft head, or "{HEADS}": the one of the course (none)')
    serve(arguments, parser, partial(create_server, create=create_engine))


if __name__ == "__main__":
    main()
