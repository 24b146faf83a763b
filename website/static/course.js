// Small services of every page: what scrolls in its own box can be reached by keyboard, and folded text opens for print.
(function () {
  "use strict";

  function reachable() {
    document.querySelectorAll(".bd-article pre, .bd-article div.math, .bd-article div.math > mjx-container, " +
      ".bd-article .pst-scrollable-table-container").forEach(function (box) {
        if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.setAttribute("tabindex", "0");
        else box.removeAttribute("tabindex");
      });
  }

  function named() {  // the theme folds pages below a page of the navigation, and leaves the fold without a name
    document.querySelectorAll("nav li.has-children > details > summary").forEach(function (fold) {
      var above = fold.closest("li").querySelector("a");
      fold.setAttribute("aria-label", "Pages below " + (above ? above.textContent.trim() : "this one"));
    });
  }

  named();
  window.addEventListener("load", function () {
    reachable();
    if (window.MathJax && MathJax.startup) MathJax.startup.promise.then(reachable);
  });
  window.addEventListener("resize", reachable);
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll(".bd-article details:not(.hide)").forEach(function (fold) {
      if (!fold.open) { fold.open = true; fold.dataset.closed = "true"; }
    });
  });
  window.addEventListener("afterprint", function () {
    document.querySelectorAll("details[data-closed]").forEach(function (fold) {
      fold.open = false;
      delete fold.dataset.closed;
    });
  });
})();
