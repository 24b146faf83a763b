"""The lectures and the labs as pages: staged copies of their notebooks, which Sphinx then turns into HTML."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import nbformat

from utils import predictions
from utils.notebooks import is_folded, tags
from website import laptop
from website.cells import Figures, all_html, names_a_shade, tabs
from website.places import PREREQUISITES, labs, launches, lectures, on_github, page_of
from website.prose import (
    anchor_equations,
    link_equations,
    link_lectures,
    own_lines,
    reading_minutes,
    tagged,
    under_title,
)

#: The beginning of the fold that holds what a prompt holds back.
FOLD = '<details class="predict-held"><summary>Show the answer</summary>'
#: What a page with prompts loads.
PREDICT = '<link rel="stylesheet" href="../_static/predict.css">\n<script src="../_static/predict.js" defer></script>\n'


def write(source: Path) -> None:
    """Stage the prerequisites, every lecture and every lab below the folder of Sphinx's sources."""
    (source / "_static" / "predict.js").write_text(predictions.script(), encoding="utf-8")
    (source / "_static" / "predict.css").write_text(predictions.style(), encoding="utf-8")
    for path in [PREREQUISITES, *lectures(), *labs()]:
        target = source / f"{page_of(path)}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        figures = Figures(source / "_static" / "figures", "../_static/figures", path.stem)
        nbformat.write(staged(path, figures), target)


def staged(path: Path, figures: Figures) -> nbformat.NotebookNode:
    """A notebook as its page shows it; ValueError if it has no title or a figure no alternative text."""
    notebook = nbformat.read(path, as_version=4)
    texts = [cell.source for cell in notebook.cells if _is_text(cell)]
    numbers = {number for text in texts for number in tagged(text)}
    pages, own = mentions(path), _name(path)
    prefix = path.stem.split("_")[0]
    cells: list[Any] = []
    prompts = {prompt.cell: prompt for prompt in predictions.predictions(notebook.cells)}
    answers = {prompt.until: prompt for prompt in prompts.values()}
    for k, cell in enumerate(notebook.cells):
        if _is_text(cell):
            text = link_lectures(_relink(path, predictions.MARK.sub("", cell.source)), pages, own)
            text = link_equations(text, numbers, prefix)
            parts = [own_lines(anchor_equations(text, prefix))]
            if k in answers:
                parts = [FOLD if _folds_at_answer(answers[k]) else "", *parts, "</details>"]
            if k in prompts:
                parts += [prompt_box(prompts[k]), "" if _folds_at_answer(prompts[k]) else FOLD]
            cells.append(nbformat.v4.new_markdown_cell("\n\n".join(filter(None, parts))))
        elif "setup" not in tags(cell):
            around = notebook.cells[max(0, k - 1) : k + 2]
            figures.as_drawn = names_a_shade(*(each.source for each in around if each is cell or _is_text(each)))
            cells += _code(cell, figures, path.stem)
    minutes = reading_minutes(texts, figures.made)
    loads = PREDICT if prompts else ""
    cells[0].source = under_title(cells[0].source, loads + heading(path, minutes))
    notebook.cells = cells
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def prompt_box(prompt: predictions.Prediction) -> str:
    """The place of a prompt's form."""
    mark = html.escape(prompt.mark)
    return f'<div class="predict" id="{anchor(prompt)}" data-all="../predictions.html" data-mark="{mark}"></div>'


def _folds_at_answer(prompt: predictions.Prediction) -> bool:
    """Whether the fold of what a prompt holds back begins with its answer's cell, and not right below the prompt."""
    return prompt.held.start > prompt.cell + 1


def anchor(prompt: predictions.Prediction) -> str:
    """The place of a prompt on its page."""
    return "predict-" + prompt.name.replace(".", "-")


def _is_text(cell: Any) -> bool:
    return cell.cell_type == "markdown"


def _code(cell: Any, figures: Figures, name: str) -> list[Any]:
    made = nbformat.v4.new_code_cell(cell.source)
    made.metadata["tags"] = ["hide-input"] if is_folded(cell) else []
    shown = all_html(cell.outputs, figures)
    if laptop.GPU_OUTPUT not in tags(cell):
        made.outputs = [nbformat.v4.new_output("display_data", {"text/html": shown})] if shown else []
        return [made]
    here = all_html(laptop.outputs(name, cell), figures)
    device = cell.metadata.get("making-llms-fast", {}).get("device", "")
    sides = [
        (html.escape(f"On a GPU ({device})") if shown else "On a GPU", shown or _nothing("It was not run on one.")),
        ("On a laptop", here or _nothing("Nothing: this cell measures a GPU.")),
    ]
    return [made, nbformat.v4.new_markdown_cell(tabs(sides, "machine"))]


def _nothing(why: str) -> str:
    return f'<p class="course-nothing">{why}</p>'


def mentions(path: Path) -> dict[str, str]:
    """What a text calls other lectures and labs -> their address, relative to this notebook's page."""
    lab = page_of(path).startswith("labs/")
    found = {_name(other): ("../notebooks/" if lab else "") + other.name for other in lectures()}
    return found | {_name(other): ("" if lab else "../labs/") + other.name for other in labs()}


def _name(path: Path) -> str:
    return f"lab {path.stem[3]}" if path.stem.startswith("lab") else f"notebook {path.stem[:2]}"


def _relink(path: Path, text: str) -> str:
    """Links from a notebook in the repository: to other notebooks' pages, to a lab's modules in the repository."""
    text = re.sub(r"\]\((\w+\.py)\)", lambda module: f"]({on_github(path.parent / module[1])})", text)
    for other in lectures():
        text = text.replace(f"](../../notebooks/{other.name})", f"](../notebooks/{other.name})")
    for other in labs():
        text = text.replace(f"](../{other.parent.name}/{other.name})", f"]({other.name})")
        text = text.replace(f"](../labs/{other.parent.name}/{other.name})", f"](../labs/{other.name})")
    return text


def heading(path: Path, minutes: int) -> str:
    """What stands under a page's title: minutes to read it, where to run it, where its source is."""
    opens = " ".join(
        f'<a href="{html.escape(place.url)}" title="{html.escape(place.note)}">{place.name}</a>'
        for place in launches(path)
    )
    source = f'<a href="{html.escape(on_github(path))}">source</a>'
    download = f'<a href="{html.escape(on_github(path, "raw"))}" download>download</a>'
    files = ""
    if page_of(path).startswith("labs/"):
        folder = on_github(path.parent, "tree")
        files = f' <span class="course-files"><a href="{folder}">the files that you write in</a></span>'
    return (
        '<div class="course-bar" role="group" aria-label="This page">'
        f'<span class="course-minutes">{minutes} min to read</span>'
        f'<span class="course-launch"><span>run it in</span> {opens}</span>'
        f'<span class="course-source">{source} {download}</span>{files}</div>\n'
    )
