"""A tab of a browser with a living figure in an otherwise empty page, as a notebook shows it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from explorer_cases import RUN

from utils import living
from utils.plots.show import Animation

STILL = Animation("", b"", "A living figure in an otherwise empty page")
#: The theme's colours, as the site sets them in the dark.
DARK = (
    "<style>:root { --pst-color-text-base: #ced6dd; --pst-color-text-muted: #9ca4af; --pst-color-background: #121212;"
    "--pst-color-on-background: #222832; --pst-color-border: #48566b; --pst-color-primary: #7dc7f5 }"
    "body { background: #121212; color: #ced6dd }</style>"
)
PAGE = (
    '<!doctype html><html lang="en" data-theme="{theme}"><head><meta charset="utf-8"><title>{name}</title>'
    '<meta name="viewport" content="width=device-width">{style}</head><body><main><h1>{name}</h1>{figure}</main></body>'
)
#: Measures each frame that draws a figure anew: the script and the layout that it makes necessary.
MEASURED = """() => {
  window.frames_ms = [];
  const drawn = () => [...document.querySelectorAll(".mlf-plot svg")];
  const ask = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (act) => ask((now) => {
    const [before, begin] = [drawn(), performance.now()];
    act(now);
    document.body.offsetHeight;
    const end = performance.now();
    if (drawn().some((svg, i) => svg !== before[i])) window.frames_ms.push(end - begin);
  });
}"""
#: Milliseconds of eleven drawings of 500 squares and their labels, each with its layout, in an SVG of its own.
YARDSTICK = """() => [...Array(11)].map(() => {
  const begin = performance.now();
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (let i = 0; i < 500; i += 1) {
    for (const tag of ["rect", "text"]) {
      const each = document.createElementNS(svg.namespaceURI, tag);
      for (const name of ["x", "y", "width", "height"]) each.setAttribute(name, (i * 7) % 400);
      if (tag === "text") each.textContent = String(i);
      svg.append(each);
    }
  }
  document.body.append(svg);
  svg.getBBox();
  svg.remove();
  return performance.now() - begin;
})"""
#: Texts and knobs that their drawing cuts off, and pairs of texts that lie on each other.
CROWDED = """() => {
  const found = [];
  for (const svg of document.querySelectorAll(".mlf-plot svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text, .mlf-knob")].map((each) => [each, each.getBoundingClientRect()])
      .filter(([, box]) => box.width);
    const name = (each) => each.textContent || each.parentNode.getAttribute("aria-label");
    for (const [each, box] of boxes) {
      const across = Math.max(frame.left - box.left, box.right - frame.right);
      const out = Math.max(across, frame.top - box.top, box.bottom - frame.bottom);
      if (out > 1.5) found.push(`${name(each)} is cut`);
    }
    const texts = boxes.filter(([each]) => each.tagName === "text");
    texts.forEach(([a, one], i) => texts.slice(i + 1).forEach(([b, two]) => {
      const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const high = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
      if (wide > 2 && high > 5) found.push(`${name(a)} lies on ${name(b)}`);
    }));
  }
  return found;
}"""


class LivingTab:
    """Opens living figures and keeps what went wrong in them."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1000, "height": 900})
        self.wrong: list[str] = []
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda r: None if r.url.startswith(("about:", "data:")) else self.wrong.append(r.url))

    def open(self, name: str, theme: str = "light", **settings: object) -> Any:
        """The page with this figure."""
        figure = living.show(name, STILL, **settings).html
        self.page.goto("about:blank")
        style = DARK if theme == "dark" else ""
        self.page.set_content(PAGE.format(name=name, theme=theme, style=style, figure=figure))
        self.page.wait_for_selector(f'[data-living="{name}"][data-ready] .mlf-results')
        return self.page

    def run(self, name: str, inputs: Sequence[dict[str, str]]) -> list[Any]:
        """What the figure computes from each input, given as texts that a reader types."""
        return self.open(name).evaluate(RUN, [name, list(inputs)])

    def frames(self) -> Callable[[], float]:
        """Time each frame that draws a figure anew from now on.

        Returns:
            A function that gives the median so far, in milliseconds: the script and the layout that it makes necessary.
        """
        self.page.evaluate(MEASURED)

        def median() -> float:
            taken = self.page.evaluate("window.frames_ms")
            assert len(taken) >= 5, f"{len(taken)} frames were drawn"
            return statistics.median(taken)

        return median

    def frame(self, handle: Any, across: int = 0, down: int = -60) -> float:
        """Drag a handle there, back and there, five ways in all; what a frame that draws takes, in milliseconds."""
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        x, y, steps = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, 24
        taken = self.frames()
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for way in range(5):
            for k in range(1, steps + 1):
                share = (k if way % 2 == 0 else steps - k) / steps
                self.page.mouse.move(x + across * share, y + down * share)
        self.page.wait_for_timeout(50)
        self.page.mouse.up()
        return taken()

    def budget(self) -> float:
        """Milliseconds that a frame may take on this machine: those of 60 frames a second, or more on a slow one.

        Machines that run tests differ by a factor of two and more, so a frame is also held against a drawing of 1,000
        elements in the same tab, now, for which a machine that is fast enough takes 1000/60 ms at most.
        """
        return max(1000 / 60, statistics.median(self.page.evaluate(YARDSTICK)))

    def resize(self, width: int) -> None:
        """Give the page this width and wait until every drawing has it."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.wait_for_function(
            "(width) => innerWidth === width && [...document.querySelectorAll('.mlf-plot > svg')]"
            ".every((svg) => [0, Number(svg.getAttribute('width'))].includes(svg.parentNode.clientWidth))",
            arg=width,
        )

    def fits(self, width: int) -> bool:
        """Whether nothing is cut at this width of the page."""
        self.resize(width)
        inside = self.page.evaluate(
            "(width) => [...document.querySelectorAll('.mlf-explorer :is(svg, svg text, button, input, p, dd)')]"
            ".map((each) => [each.getBoundingClientRect(), each.outerHTML.slice(0, 120)])"
            ".filter(([box]) => box.width && (box.left < -0.5 || box.right > width + 0.5)).map(([, html]) => html)",
            width,
        )
        assert inside == [], inside
        return self.page.evaluate("document.documentElement.scrollWidth") <= width

    def crowded(self, *widths: int) -> list[str]:
        """What a drawing cuts off or writes on something else, at any of these widths of the page."""
        found = []
        for width in widths:
            self.resize(width)
            found += [f"{width}: {each}" for each in self.page.evaluate(CROWDED)]
        return found

    def tabbed(self) -> set[str]:
        """What the Tab key reaches in the figure from its start, by accessible name or field."""
        self.page.evaluate("document.activeElement.blur()")
        seen: list[str] = []
        for _ in range(120):
            self.page.keyboard.press("Tab")
            here = self.page.evaluate(
                "(document.activeElement.name || document.activeElement.getAttribute('aria-label')"
                " || document.activeElement.textContent).trim()"
            )
            if here in seen or not self.page.evaluate("document.activeElement.closest('.mlf-explorer') !== null"):
                break
            seen.append(here)
        return set(seen)

    def grave(self) -> list[Any]:
        """What axe-core finds serious or critical."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        found = [v for v in axe.run(self.page).response["violations"] if v["impact"] in ("serious", "critical")]
        return [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found]

    def check(self) -> None:
        """Nothing went wrong, and nothing was asked for from elsewhere."""
        assert not self.wrong, self.wrong


@pytest.fixture(scope="module")
def living_tab(browser: Any) -> Iterator[LivingTab]:
    """One tab for a module's tests."""
    opened = LivingTab(browser)
    yield opened
    opened.page.close()
