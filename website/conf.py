"""Sphinx's configuration. ``python -m website.build`` stages the sources and runs Sphinx with this file."""

from __future__ import annotations

import textwrap
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge

from website import mathjax
from website.code_lines import CodeLines
from website.places import repository

project = "Making LLMs Fast"
author = "The authors of Making LLMs Fast"
copyright = author

extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinxcontrib.bibtex",
    "sphinx.ext.mathjax",
    "website.search",
]
templates_path = ["_templates"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

# ---- what pages may contain
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "attrs_inline", "attrs_block", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"

copybutton_selector = "div.highlight > pre"
PygmentsBridge.html_formatter = CodeLines

# ---- mathematics: a copy within the site
mathjax_path = f"mathjax/{mathjax.BUNDLE}"
mathjax3_config = mathjax.CONFIG

# ---- the look
html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["course.css", "search/search.css"]
html_js_files = [("course.js", {"defer": "defer"}), ("search/search.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_favicon = "_static/icon.svg"
html_theme_options = {
    "repository_url": repository(),
    "repository_branch": "main",
    "use_repository_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "toc_title": "On this page",
    "search_bar_text": "Search the course",
    "logo": {"text": project},
    "footer_content_items": ["copyright.html"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}


# ---- a page that is not there: its host shows 404.html at any address, so its links must start from the site's root

_FROM_ROOT = """<script>
  if (!location.pathname.endsWith("/404.html")) {
    const base = document.createElement("base"), first = location.pathname.split("/")[1];
    base.href = location.hostname.endsWith(".github.io") ? `/${first}/` : "/";
    document.head.append(base);
  }
</script>"""


def description(doctree: nodes.document | None) -> str:
    """What a search engine or a message shows of a page: its first paragraph of some length that has no formula."""
    for paragraph in doctree.findall(nodes.paragraph) if doctree else ():
        words = " ".join(paragraph.astext().split())
        if len(words) >= 60 and not any(paragraph.findall(nodes.math)):
            return textwrap.shorten(words, 200, placeholder=" …")
    return ""


def setup(app: Sphinx) -> None:
    """Describe each page, and let the page for what is missing find its parts wherever it is shown."""

    def from_root(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
        if said := escape(description(doctree)):
            context["metatags"] = context.get("metatags", "") + (
                f'<meta name="description" content="{said}"/><meta property="og:description" content="{said}"/>'
            )
        if page == "404":
            context["metatags"] = context.get("metatags", "") + _FROM_ROOT

    app.connect("html-page-context", from_root)
