// The search: in the dialog that the theme opens (Ctrl+K) and on the search page. The articles and MiniSearch are fetched
// when a reader first comes to a field, and indexed here: the site needs no server, and opens from a disk as well.
(function () {
  "use strict";
  const ROOT = document.documentElement.dataset.content_root || "./";
  const FILES = ["base-stemmer.js", "english-stemmer.js", "minisearch.js", "articles.js"];
  const IN_DIALOG = 6, ON_PAGE = 20, SNIPPET = 190;
  const EXPLAINS = 16; // how much more a page counts to which the glossary sends whoever asks for a term
  const FIELDS = { title: 6, headings: 2.5, text: 1 };

  // ---- words
  // "PagedAttention" is found by "paged attention", "all-reduce" by "allreduce", "conflict" by "conflicts",
  // "specialisation" by "specialization".
  const WORD = /[\p{L}\p{N}]+(?:[-'’][\p{L}\p{N}]+)*/gu;
  function tokens(text) {
    const found = [];
    for (const [whole] of text.matchAll(WORD)) {
      const parts = whole.split(/[-'’]/);
      found.push(...parts);
      if (parts.length > 1) found.push(parts.join(""));
    }
    return found;
  }
  const made = new Map(); // token -> its terms: most tokens come again and again
  let stemmer;
  function terms(token) {
    if (!made.has(token)) {
      const parts = token.split(/(?<=\p{Ll})(?=\p{Lu}\p{Ll})/u);
      const words = [token, ...parts].map((part) => part.toLowerCase().replace(/is(?=(e[drs]?|ing|ations?)$)/, "iz"));
      made.set(token, [...new Set([...words, ...words.map((word) => stemmer.stemWord(word))])]);
    }
    return made.get(token);
  }

  // ---- the index
  let engine = null;
  function load() {
    engine = engine || FILES.reduce((before, name) => before.then(() => fetched(name)), Promise.resolve()).then(index);
    return engine;
  }
  function fetched(name) {
    return new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = `${ROOT}_static/search/${name}`;
      script.onload = done;
      script.onerror = () => failed(new Error(`${name} did not load`));
      document.head.append(script);
    });
  }
  async function index() {
    stemmer = new window.EnglishStemmer();
    const articles = window.courseArticles, known = new Set();
    const mini = new window.MiniSearch({
      idField: "page",
      fields: Object.keys(FIELDS),
      extractField: (article, field) => field === "headings" ? article.sections.slice(1).map((s) => s[1]).join(". ") :
        field === "text" ? article.sections.map((s) => s[2]).join(" ") : article[field],
      tokenize: tokens,
      processTerm: (token) => { const all = terms(token); all.forEach((term) => known.add(term)); return all; },
    });
    await mini.addAllAsync(articles, { chunkSize: 4 }); // between the chunks the page answers
    const byPage = new Map(articles.map((article) => [article.page, article]));
    const begins = (start) => [...known].some((word) => word.startsWith(start));
    return function find(query) {
      const typed = tokens(query), last = typed.length && typed[typed.length - 1].toLowerCase();
      const mistyped = (term) => term.length > 3 && !known.has(term) && !(term === last && begins(term));
      const alike = (some, others) => some.every((one) => terms(one).some((term) => others.flatMap(terms).includes(term)));
      const named = (article) => article.terms.map(tokens).some((name) => alike(name, typed) && alike(typed, name));
      const weights = new Map(articles.map((article) => [article.page, article.weight * (named(article) ? EXPLAINS : 1)]));
      const results = mini.search(query, {
        processTerm: terms,
        boost: FIELDS,
        boostDocument: (page) => weights.get(page),
        prefix: (term) => term === last && term.length > 1,
        fuzzy: (term) => mistyped(term) && (term.length > 5 ? 2 : 1), // 2: letters that changed places
      });
      return results.map((result) => hit(byPage.get(result.id), result));
    };
  }

  // ---- what a result shows: the section that has most of the words, and the words in it
  function hit(article, result) {
    const words = new Set(Object.keys(result.match)); // as they stand in the index
    const answers = (text) => new Set(tokens(text).flatMap(terms).filter((term) => words.has(term)));
    let best = null;
    for (const [anchor, heading, text] of article.sections) {
      const there = answers(text), above = answers(heading);
      const score = new Set([...there, ...above]).size + 2 * above.size * (anchor ? 1 : 0.5);
      if (!best || score > best.score) best = { score, anchor, heading, text };
    }
    return { article, best, words };
  }
  function marked(text, words) {
    const marks = [];
    for (const match of text.matchAll(WORD)) {
      const all = tokens(match[0]).flatMap(terms).filter((term) => words.has(term));
      if (all.length) marks.push({ from: match.index, to: match.index + match[0].length, all });
    }
    return marks;
  }
  function snippet(text, words) {
    const marks = marked(text, words);
    let start = 0, most = 0;
    marks.forEach((mark, i) => { // where most of the words stand together
      const near = marks.slice(i).filter((other) => other.to < mark.from + SNIPPET - 40);
      const count = new Set(near.flatMap((other) => other.all)).size;
      if (count > most) { most = count; start = mark.from; }
    });
    const sentence = text.lastIndexOf(". ", start) + 2;
    const from = start - sentence < 70 ? (sentence > 1 ? sentence : 0) : text.lastIndexOf(" ", start - 40) + 1;
    const to = from + SNIPPET >= text.length ? text.length : text.lastIndexOf(" ", from + SNIPPET);
    const line = element("p", "snippet", from > 1 && from !== sentence ? "… " : "");
    let at = from;
    for (const mark of marks.filter((one) => one.from >= from && one.to <= to)) {
      line.append(text.slice(at, mark.from), element("mark", "", text.slice(mark.from, mark.to)));
      at = mark.to;
    }
    line.append(text.slice(at, to) + (to < text.length ? " …" : ""));
    return line;
  }
  function element(name, kind, text) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text) made.textContent = text;
    return made;
  }
  function link(place, text) {
    const made = element("a", "", text);
    made.href = ROOT + place;
    return made;
  }
  function item({ article, best, words }) {
    const made = element("li"), head = element("p", "found-title");
    head.append(link(article.page, article.title));
    if (article.kind) head.append(element("span", "found-kind", article.kind));
    made.append(head);
    if (best.anchor) {
      const section = element("p", "found-section");
      section.append(link(`${article.page}#${best.anchor}`, best.heading));
      made.append(section);
    }
    if (best.text) made.append(snippet(best.text, words));
    return made;
  }

  // ---- a field and its results
  function attach(form, most) {
    const input = form.querySelector("input"), said = element("p", "found-count"), list = element("ol", "found");
    const dialog = form.closest("dialog"), place = element("div", "found-place");
    let turn = 0;
    said.setAttribute("role", "status");
    place.append(said, list);
    place.hidden = true;
    form.after(place);

    async function show() {
      const query = input.value.trim(), mine = ++turn;
      if (!dialog) history.replaceState(null, "", query ? `?q=${encodeURIComponent(query)}` : location.pathname);
      if (!query) { place.hidden = true; return; }
      let hits;
      try {
        hits = (await load())(query);
      } catch (error) {
        said.textContent = `The search did not load: ${error.message}.`;
        place.hidden = false;
        return;
      }
      if (mine !== turn) return; // the reader has typed on
      list.replaceChildren(...hits.slice(0, most).map(item));
      const pages = hits.length === 1 ? "1 page" : hits.length > most ? `The first ${most} of ${hits.length} pages` :
        `${hits.length || "No"} pages`;
      said.textContent = `${pages} for “${query}”`;
      if (dialog && hits.length > most) {
        const all = link(`search.html?q=${encodeURIComponent(query)}`, "Show more");
        said.append(" · ", all);
      }
      place.hidden = false;
      place.scrollTop = 0;
    }
    input.addEventListener("input", show);
    input.addEventListener("focus", load, { once: true });
    form.addEventListener("submit", (event) => {
      if (dialog) return; // to the search page
      event.preventDefault();
      show();
    });
    form.parentElement.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
      const stops = [input, ...list.querySelectorAll(".found-title a")];
      const here = stops.indexOf(document.activeElement);
      const next = stops[(here < 0 ? 0 : here) + (event.key === "ArrowDown" ? 1 : -1)];
      if (here < 0 || !next) return;
      event.preventDefault();
      next.focus();
    });
    if (!dialog) {
      input.value = new URLSearchParams(location.search).get("q") || "";
      input.focus();
      input.select();
      show();
    }
  }

  const dialog = document.querySelector("#pst-search-dialog form.bd-search");
  if (dialog) attach(dialog, IN_DIALOG);
  const page = document.querySelector(".bd-article form.bd-search");
  if (page) attach(page, ON_PAGE);
})();
