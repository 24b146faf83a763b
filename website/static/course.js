// Small services of every page: what scrolls in its own box can be reached by keyboard, and folded text opens for print.
(function () {
  "use strict";

  var BOXES = ".bd-article :is(pre, div.math, div.math > mjx-container, mjx-container.course-long, .course-scroll, [role=region], .mlf-scroll, .pst-scrollable-table-container)";

  function fit() {  // an equation that is a little too wide for its column is set a little smaller
    var wide = Array.from(document.querySelectorAll(".bd-article div.math > mjx-container"), function (equation) {
      equation.parentElement.style.fontSize = "";
      return equation;
    }).map(function (equation) {  // a numbered one has a least width, and leaves its box instead of scrolling within itself
      var box = equation.parentElement;
      return [box, Math.min(equation.clientWidth / equation.scrollWidth, box.clientWidth / box.scrollWidth)];
    });
    wide.forEach(function (pair) {
      if (pair[1] < 1 && pair[1] > 0.8) pair[0].style.fontSize = Math.floor(98 * pair[1]) + "%";
    });
  }

  function inline() {  // a formula within a line that is longer than the line scrolls by itself
    document.querySelectorAll(".bd-article span.math > mjx-container").forEach(function (formula) {
      formula.classList.remove("course-long");
      var line = formula.closest("td, th") ? null : formula.closest("p, li, dd, figcaption");  // a table scrolls as a whole
      var long = line && line.clientWidth && formula.getBoundingClientRect().width > line.clientWidth;
      formula.classList.toggle("course-long", Boolean(long));
    });
  }

  function reachable() {  // a box that hides something takes the keyboard, and shows that it goes on
    fit();
    inline();
    document.querySelectorAll(BOXES).forEach(function (box) {
      var wide = box.scrollWidth > box.clientWidth + 1;
      if (wide || box.scrollHeight > box.clientHeight + 1) box.setAttribute("tabindex", "0");
      else box.removeAttribute("tabindex");
      fade(box);
      if (wide) box.addEventListener("scroll", fade, { passive: true });
    });
  }

  var waiting = false;
  function soon() {
    if (!waiting) requestAnimationFrame(function () { waiting = false; reachable(); });
    waiting = true;
  }

  function fade(box) {
    box = box.target || box;
    box.classList.toggle("course-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
  }

  function glued() {  // the punctuation behind a formula does not begin the next line
    document.querySelectorAll(".bd-article span.math").forEach(function (formula) {
      var rest = formula.nextSibling, found = rest && rest.nodeType === Node.TEXT_NODE && /^[.,;:!?)\]’”]+/.exec(rest.data);
      if (!found || formula.parentElement.matches(".course-glued")) return;
      var both = document.createElement("span");
      both.className = "course-glued";
      formula.before(both);
      both.append(formula, found[0]);
      rest.data = rest.data.slice(found[0].length);
    });
  }

  function boxed() {  // frames that were drawn once scroll in a box on a phone, where their letters would be too small
    document.querySelectorAll("figure[data-mlf]").forEach(function (figure) {
      if (figure.querySelector("script").textContent.includes('"kind":"waves"')) return;  // drawn again for each width
      new MutationObserver(put).observe(figure, { childList: true });
      put();

      function put(_, watch) {
        var canvas = figure.querySelector("canvas");
        if (!canvas || canvas.parentElement.matches(".course-canvas")) return;
        if (watch) watch.disconnect();
        var box = document.createElement("div");
        box.className = "course-scroll course-canvas";
        box.style.setProperty("--drawn", canvas.parentElement.style.maxWidth);
        canvas.before(box);
        box.append(canvas);
        soon();
      }
    });
  }

  function named() {  // the theme folds pages below a page of the navigation, and leaves the fold without a name
    document.querySelectorAll("nav li.has-children > details > summary").forEach(function (fold) {
      var above = fold.closest("li").querySelector("a");
      fold.setAttribute("aria-label", "Pages below " + (above ? above.textContent.trim() : "this one"));
    });
  }

  named();
  glued();
  boxed();
  window.addEventListener("load", function () {
    reachable();
    if (document.fonts) document.fonts.ready.then(reachable);
    if (window.MathJax && MathJax.startup) MathJax.startup.promise.then(reachable);
  });
  window.addEventListener("resize", reachable);
  document.addEventListener("toggle", soon, true);  // what a fold showed first had no width before
  window.addEventListener("beforeprint", function () {  // on white paper, with hints and answers, without what was checked
    document.documentElement.dataset.screen = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    document.querySelectorAll(".bd-article details:not(.hide, .course-claims, .course-claim)").forEach(function (fold) {
      if (!fold.open) { fold.open = true; fold.dataset.closed = "true"; }
    });
  });
  window.addEventListener("afterprint", function () {
    document.documentElement.dataset.theme = document.documentElement.dataset.screen;
    document.querySelectorAll("details[data-closed]").forEach(function (fold) {
      fold.open = false;
      delete fold.dataset.closed;
    });
  });
})();
