// A filter over the tables of claims, names for boxes that scroll, and a mend of the bibliography. The pages read as
// plain tables and lists without it.
"use strict";

(function () {
  const KINDS = ["derive", "measure", "state"];

  // A table that is wider than its box must be reachable by keyboard and have a name.
  function nameBoxes() {
    for (const table of document.querySelectorAll(".claims table, .records table, .provenance table")) {
      const box = table.parentElement;
      const heading = table.closest("section")?.querySelector("h1, h2, h3");
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", `${heading ? heading.firstChild.textContent : document.title}: table`);
      box.style.overflowX = "auto";
    }
  }

  // Docutils calls the bibliography a list, but its entries are no list items: screen readers are better without.
  function mendBibliography() {
    document.querySelectorAll('.citation-list[role="list"]').forEach((list) => list.removeAttribute("role"));
  }

  function element(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  // One entry a claim: its row, the words that it can be found by, and its kind.
  function readRows() {
    return [...document.querySelectorAll(".claims tbody tr")].map((row) => ({
      row,
      words: row.textContent.toLowerCase(),
      kind: KINDS.find((kind) => row.querySelector(`.kind-${kind}`)),
    }));
  }

  function buildFilter(rows) {
    const search = element("input", { type: "search", id: "claims-search", autocomplete: "off" });
    search.placeholder = "words, id, source";
    const name = element("label", { htmlFor: "claims-search", className: "visually-hidden" }, "Filter the claims");
    const boxes = KINDS.map((kind) => element("input", { type: "checkbox", value: kind, checked: true }));
    const labels = boxes.map((box) =>
      element("label", {}, box, element("span", { className: `kind kind-${box.value}` }, box.value)),
    );
    const count = element("output", {});
    count.setAttribute("aria-live", "polite");
    const form = element("form", { className: "table-filter" }, name, search, ...labels, count);
    form.setAttribute("role", "search");

    function apply() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const kinds = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
      let shown = 0;
      for (const entry of rows) {
        const fits = kinds.has(entry.kind) && words.every((word) => entry.words.includes(word));
        entry.row.hidden = !fits;
        shown += fits;
      }
      for (const group of document.querySelectorAll(".claims")) {
        const section = group.closest("section");
        section.hidden = !group.querySelector("tbody tr:not([hidden])");
      }
      count.textContent = shown === rows.length ? `all ${shown} claims` : `${shown} of ${rows.length} claims`;
    }

    let waiting = 0;
    search.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(apply, 150);
    });
    boxes.forEach((box) => box.addEventListener("change", apply));
    form.addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", () => {
      const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
      if (target && target.closest("[hidden]")) {
        search.value = "";
        boxes.forEach((box) => (box.checked = true));
        apply();
        target.scrollIntoView();
      }
    });
    apply();
    return form;
  }

  function start() {
    nameBoxes();
    mendBibliography();
    const first = document.querySelector(".claims");
    if (first) first.closest("section").before(buildFilter(readRows()));
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
