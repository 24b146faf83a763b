"""Where the course's things lie: in the repository, on the site, and on the hosts that open a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from utils.claims.ledger import notebook_paths
from utils.notebooks import repository_url

ROOT = Path(__file__).resolve().parent.parent
WEBSITE = ROOT / "website"
LECTURES = ROOT / "notebooks"
LABS = ROOT / "labs"
#: What a reader may try before the first lecture: a page of the site, but no lecture.
PREREQUISITES = LECTURES / "00_prerequisites.ipynb"
BRANCH = "main"


@cache
def repository() -> str:
    """The address of the repository, without a slash at its end."""
    return repository_url().rstrip("/")


@dataclass(frozen=True)
class Launch:
    """A place that opens a notebook: its name, its address, and what a reader should know before a click."""

    name: str
    url: str
    note: str


def lectures() -> list[Path]:
    """The lectures' notebooks in reading order."""
    return [path for path in notebook_paths() if path != PREREQUISITES]


def labs() -> list[Path]:
    """The labs' notebooks as students get them, in order."""
    return sorted(LABS.glob("lab*/lab*.ipynb"))


def in_repository(path: Path) -> str:
    """A file's place in the repository, with slashes; ValueError for one outside."""
    return path.resolve().relative_to(ROOT).as_posix()


def page_of(path: Path) -> str:
    """The site's page of a notebook, without suffix: ``notebooks/05_online_softmax`` or ``labs/lab1_roofline``."""
    place = in_repository(path)
    if place.startswith("labs/"):
        return f"labs/{path.stem}"
    return place.removesuffix(".ipynb")


def on_github(path: Path, view: str = "blob") -> str:
    """The address of a file ("blob"), a folder ("tree") or a file's bytes ("raw") in the repository."""
    return f"{repository()}/{view}/{BRANCH}/{quote(in_repository(path))}"


def launches(path: Path) -> list[Launch]:
    """The places that open this notebook in a browser, each with its address."""
    owner, name = repository().split("/")[-2:]
    place = quote(in_repository(path))
    binder = f"https://mybinder.org/v2/gh/{owner}/{name}/{BRANCH}?urlpath={quote(f'lab/tree/{place}', safe='')}"
    return [
        Launch(
            "Colab",
            f"https://colab.research.google.com/github/{owner}/{name}/blob/{BRANCH}/{place}",
            "a hosted runtime, with a GPU if you choose one",
        ),
        Launch(
            "Kaggle",
            f"https://www.kaggle.com/kernels/welcome?src={on_github(path)}",
            "a hosted runtime, with a GPU if you choose one",
        ),
        Launch("Binder", binder, "a hosted CPU, nothing to sign up for; the first start takes minutes"),
        Launch(
            "Codespaces",
            f"https://codespaces.new/{owner}/{name}?quickstart=1",
            "the whole course in a container of your own, on a CPU",
        ),
    ]
