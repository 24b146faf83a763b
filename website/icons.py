"""The theme's icons, cut down to those that the pages show: a twentieth of what a first visit would fetch.

The theme ships all of Font Awesome Free as one script of 1.5 MB. Its drawings of the few icons in use are taken out of
that script when the site is built; nothing of it is kept in this repository.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pydata_sphinx_theme

#: Icons that the theme's templates use on our pages; a test holds this against the built pages.
NAMES = (
    "angle-left",
    "angle-right",
    "arrow-up",
    "bars",
    "chevron-down",
    "circle-half-stroke",
    "github",
    "list",
    "magnifying-glass",
    "moon",
    "outdent",
    "sun",
    "xmark",
)
#: Where the theme's templates look for the script, below the static files.
PLACE = Path("scripts") / "fontawesome.js"

_SCRIPT = """\
// Icons of Font Awesome Free (https://fontawesome.com, icons under CC BY 4.0), those that these pages use.
(function () {
  "use strict";
  var icons = %s;
  var style = document.createElement("style");
  style.textContent = ".svg-inline--fa{display:inline-block;height:1em;width:1.25em;overflow:visible;" +
    "vertical-align:-.125em;box-sizing:content-box}.fa-lg{font-size:1.25em;line-height:.05em;vertical-align:-.075em}";
  document.head.appendChild(style);
  document.querySelectorAll(".fa-solid, .fa-regular, .fa-brands, .fab, .fas").forEach(function (place) {
    var name = Array.prototype.find.call(place.classList, function (c) { return icons[c.slice(3)]; });
    if (!name) return;
    var icon = icons[name.slice(3)], svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    Array.prototype.forEach.call(place.attributes, function (a) { svg.setAttribute(a.name, a.value); });
    svg.setAttribute("class", place.getAttribute("class") + " svg-inline--fa");
    svg.setAttribute("viewBox", "0 0 " + icon[0] + " " + icon[1]);
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("focusable", "false");
    var path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("fill", "currentColor");
    path.setAttribute("d", icon[2]);
    svg.appendChild(path);
    place.replaceWith(svg);
  });
})();
"""


def drawings(script: str) -> dict[str, tuple[int, int, str]]:
    """Width, height and path of each of :data:`NAMES`, out of Font Awesome's script; ValueError if one is not there."""
    found = {}
    for name in NAMES:
        key = rf'(?:"{name}"|(?<![\w-]){name})' if name.isalnum() else f'"{name}"'
        icon = re.search(key + r':\[(\d+),(\d+),\[[^\]]*\],"[0-9a-f]+","([^"]+)"\]', script)
        if icon is None:
            raise ValueError(f"the theme's icons have none called {name!r}")
        found[name] = int(icon[1]), int(icon[2]), icon[3]
    return found


def write(static: Path) -> None:
    """Put the cut-down script where the theme's own would be."""
    theme = Path(pydata_sphinx_theme.__file__).parent / "theme" / "pydata_sphinx_theme" / "static" / PLACE
    (static / PLACE).parent.mkdir(parents=True, exist_ok=True)
    icons = drawings(theme.read_text(encoding="utf-8"))
    (static / PLACE).write_text(_SCRIPT % json.dumps(icons, separators=(",", ":")), encoding="utf-8")
