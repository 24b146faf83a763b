/* Prompts that take a guess before the answer shows, and the list of a reader's guesses. The site loads this file with its
   pages, JupyterLab with the course's extension. Guesses stay in the browser's storage. */
(function (root) {
  "use strict";

  const MLF = (root.MLF = root.MLF || {});
  const { number, parseNumber } = MLF.units;
  MLF.InputError = MLF.InputError || class InputError extends Error {
    constructor(field, message) {
      super(message);
      this.field = field;
    }
  };

  const KEY = "making-llms-fast.predictions";
  const FACTOR = 1.5; // a guess this near is right where a prompt says nothing else

  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
    return element;
  }

  /* ---- what a browser keeps: name -> {guess, answer, ratio, right, question, at}; guess is null if none was made ---- */

  let unsaved = null; // where a browser keeps nothing, guesses last as long as the page

  function guesses() {
    if (unsaved) return unsaved;
    try {
      const kept = JSON.parse(root.localStorage.getItem(KEY) || "{}");
      return kept && typeof kept === "object" && !Array.isArray(kept) ? kept : {};
    } catch {
      return {};
    }
  }

  function keep(changed) {
    try {
      root.localStorage.setItem(KEY, JSON.stringify(changed));
    } catch {
      unsaved = changed;
    }
    root.dispatchEvent(new Event("mlf-predictions"));
  }

  /* ---- a prompt's mark: "predict 05.maxima: 9.6 maxima = online.maxima.8192" (utils/predictions/__init__.py) ---- */

  const CHOICE = /^predict (\S+): choice (\d)$/;
  const NUMBER = /^predict (\S+): (\d+(?:,\d{3})*(?:\.\d+)?)(?: ([^=]+?))?(?:, (?:(exactly)|within (\d+(?:\.\d+)?)))? = \S/;

  /** {name, right} or {name, answer, printed, unit, factor}, where a factor of 1 asks for the printed digits; or null. */
  function parse(mark) {
    let found = CHOICE.exec(mark);
    if (found) return { name: found[1], right: Number(found[2]) };
    found = NUMBER.exec(mark);
    if (!found) return null;
    const [, name, printed, unit, exactly, factor] = found;
    const answer = Number(printed.replace(/,/g, ""));
    return { name, answer, printed, unit: unit || "", factor: exactly ? 1 : Number(factor || FACTOR) };
  }

  /* ---- what a reader types ---- */

  const PREFIXES = { n: 1e-9, µ: 1e-6, u: 1e-6, m: 1e-3, "": 1, k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15,
    Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30 };
  const UNIT = /^(n|µ|u|m|k|K|M|G|T|P|Ki|Mi|Gi|)(FLOPs?\/s|FLOPs?|tokens\/s|B\/s|B|s|Hz)$/;

  /** The number in `text` in a prompt's unit: "950 kB" is 0.95 where MB are asked for, "4/3" a quotient. */
  function read(text, unit) {
    const wanted = UNIT.exec(unit);
    let plain = text.trim();
    let scale = 1;
    const typed = wanted && /^(.*[\d.])\s*([a-zµ/]+)$/i.exec(plain);
    const given = typed && UNIT.exec(typed[2]);
    if (given && given[2].replace("FLOPs", "FLOP") === wanted[2].replace("FLOPs", "FLOP")) {
      [plain, scale] = [typed[1], PREFIXES[given[1]] / PREFIXES[wanted[1]]];
    } else if (unit && plain.toLowerCase().endsWith(unit.toLowerCase())) {
      plain = plain.slice(0, -unit.length);
    }
    const parts = plain.split("/");
    if (parts.length > 2) parts.splice(0, parts.length, plain);
    const [above, below] = parts.map((part) => parseNumber("guess", part, -1e30, 1e30));
    if (below === 0) throw new MLF.InputError("guess", "Nothing can be divided by 0.");
    return (below === undefined ? above : above / below) * scale;
  }

  function isRight(guess, asked) {
    if (asked.factor > 1) return guess / asked.answer <= asked.factor && asked.answer / guess <= asked.factor && guess > 0;
    const places = (asked.printed.split(".")[1] || "").length;
    return Math.abs(guess - asked.answer) <= 0.5 * 10 ** -places * (1 + 1e-9);
  }

  const withUnit = (text, unit) => (unit ? `${text} ${unit}` : text);

  /* ---- a prompt ---- */

  /** Put a radio button before each item of the list; does nothing to a list that has them. */
  function buttons(list, name, form) {
    if (list.dataset.predict === name) return;
    list.dataset.predict = name;
    list.classList.add("predict-choices");
    list.setAttribute("role", "radiogroup");
    list.setAttribute("aria-label", "Your prediction");
    list.setAttribute("data-lm-suppress-shortcuts", "true");
    [...list.children].forEach((item, k) => {
      item.setAttribute("role", "presentation");
      const text = item.querySelector(":scope > p") || item;
      const label = h("label", {}, h("input", { type: "radio", name: `predict-${name}`, value: k + 1, form }));
      label.append(h("span", { class: "predict-unseen" }, `Choice ${k + 1}: `), h("span", { class: "predict-choice" }, ...text.childNodes));
      text.append(label);
    });
  }

  /** Show one prompt, which waits for a guess or has got one before.

      mark     The prompt's comment.
      box      The empty element below the prompt that takes the form.
      list     Gives the list of choices, which may be drawn anew at any time; null where a number is asked for.
      asking   Gives the elements that the prompt is drawn with, for the question's text in the list of guesses.
      hold     Hides (true) or shows (false) what answers the prompt.
      more     Gives the element that leads to the list of all guesses.
      after    What happens once the reader has committed; where it is missing, the verdict takes the focus.

      Returns {name, refresh, focus}: refresh brings everything up to date, focus goes where the reader answers. */
  function mount({ mark, box, list, asking, hold, more, after }) {
    const asked = parse(mark);
    if (!asked) return null;
    const { name } = asked;
    const id = `predict-form-${name.replace(/\W/g, "-")}`;
    const field = asked.right ? null
      : h("input", { type: "text", inputmode: "text", autocomplete: "off", spellcheck: "false", id: `${id}-guess`,
        "aria-describedby": `${id}-note` });
    const note = h("p", { class: "predict-note", id: `${id}-note`, role: "status" });
    const enter = (event) => {
      if (event.key === "Enter" && event.target.matches("input")) commit(event); // JupyterLab takes it from the form
    };
    const form = h("form", { id, novalidate: true, onsubmit: commit, onkeydown: enter },
      field ? [h("label", { for: field.id }, "Your prediction"), field, h("span", { class: "predict-unit" }, asked.unit)] : null,
      h("button", { type: "submit" }, "Commit"),
      h("button", { type: "button", class: "predict-plain", onclick: () => tell(null) }, "Show the answer"));
    const verdict = h("div", { class: "predict-verdict", tabindex: "-1" });
    box.classList.add("predict-box");
    box.setAttribute("data-lm-suppress-shortcuts", "true");
    box.replaceChildren(form, note, verdict);
    let shown = null;

    const chosen = () => {
      const now = list();
      return now ? [...now.querySelectorAll("input[type=radio]")] : [];
    };

    function commit(event) {
      event.preventDefault();
      note.textContent = "";
      if (!field) {
        const found = chosen().find((radio) => radio.checked);
        if (found) tell(Number(found.value));
        else note.textContent = "Choose one, or ask for the answer.";
        return;
      }
      if (!field.value.trim()) {
        note.textContent = "Enter a number, or ask for the answer.";
        return;
      }
      try {
        tell(read(field.value, asked.unit));
      } catch (error) {
        if (!(error instanceof MLF.InputError)) throw error;
        note.textContent = error.message;
        field.focus();
      }
    }

    function tell(guess) {
      const entry = { guess, question: questionOf(asking()), at: new Date().toISOString().slice(0, 10) };
      if (asked.right) {
        const items = chosen().map((radio) => radio.closest("label").querySelector(".predict-choice").textContent.trim());
        entry.answer = items[asked.right - 1];
        entry.said = guess === null ? null : items[guess - 1];
        entry.right = guess === asked.right;
      } else {
        entry.answer = withUnit(asked.printed, asked.unit);
        entry.said = guess === null ? null : withUnit(number(guess, 4), asked.unit);
        entry.right = guess !== null && isRight(guess, asked);
        if (guess !== null && asked.answer !== 0) entry.ratio = guess / asked.answer;
      }
      keep({ ...guesses(), [name]: entry });
      refresh();
      if (after) after();
      else verdict.focus({ preventScroll: true });
    }

    function refresh() {
      const entry = guesses()[name];
      const now = list();
      if (now) buttons(now, name, id);
      const state = JSON.stringify(entry || null);
      form.hidden = note.hidden = Boolean(entry);
      verdict.hidden = !entry;
      hold(!entry);
      chosen().forEach((radio) => {
        radio.disabled = Boolean(entry);
        if (entry) radio.checked = Number(radio.value) === entry.guess;
        const item = radio.closest("li");
        item.classList.toggle("predict-right", Boolean(entry) && Number(radio.value) === asked.right);
        item.classList.toggle("predict-wrong", Boolean(entry) && Number(radio.value) === entry.guess && !entry.right);
      });
      if (state === shown) return;
      shown = state;
      if (entry) verdict.replaceChildren(...verdictOf(entry, asked), more());
      else if (field) field.value = "";
    }

    refresh();
    return { name, refresh, focus: () => (field || chosen()[0] || form).focus() };
  }

  /** What a prompt asks: the text of the last paragraph that begins with "Predict" and of what follows but its choices. */
  function questionOf(elements) {
    const first = elements.findLastIndex((each) => /^\s*(Predict|Guess)\b/.test((each.querySelector("strong") || each).textContent));
    const texts = elements.slice(Math.max(0, first)).filter((each) => !each.matches("ul")).map((each) => each.textContent.trim());
    return texts.join(" ").replace(/^.*?Predict\.?\s*/s, "").replace(/\s+/g, " ").slice(0, 400);
  }

  function verdictOf(entry, asked) {
    const part = (term, value) => h("span", { class: "predict-part" }, `${term} `, h("b", {}, value));
    if (asked.right) {
      const said = entry.guess === null ? "The answer is marked above." : entry.right ? "✓ right" : "✗ the right answer is marked above";
      return [h("span", { class: entry.right ? "predict-part predict-good" : "predict-part" }, said)];
    }
    if (entry.guess === null) return [part("The answer:", entry.answer)];
    const within = asked.factor === 1 ? "" : `, within a factor of ${asked.factor}`;
    const said = entry.right ? `✓ right${within}` : asked.factor === 1 ? "✗ not this time" : `✗ not${within.slice(1)}`;
    return [
      part("You predicted", entry.said),
      part("the answer is", entry.answer),
      entry.ratio === undefined ? null : part("ratio", number(entry.ratio, 3)),
      h("span", { class: entry.right ? "predict-part predict-good" : "predict-part predict-bad" }, said),
    ].filter(Boolean);
  }

  /* ---- how a reader's guesses fared ---- */

  const s = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  /** The numbers among the guesses on a line from a hundredth of the answer to a hundred times it. */
  function line(entries) {
    const [width, edge] = [640, 40];
    const x = (ratio) => edge + ((Math.max(-2, Math.min(2, Math.log10(ratio))) + 2) / 4) * (width - 2 * edge);
    const stacks = new Map();
    const dots = entries.map(([name, { ratio, right, said, answer }]) => {
      const at = Math.round(x(ratio) / 10) * 10;
      stacks.set(at, (stacks.get(at) || 0) + 1);
      const dot = s("circle", { cx: at, cy: 88 - 11 * (stacks.get(at) - 1), r: 4.5, class: right ? "predict-good" : "predict-bad" });
      dot.append(s("title", {}, `${name}: ${said}, the answer is ${answer}`));
      return dot;
    });
    const rise = Math.max(0, 11 * (Math.max(0, ...stacks.values()) - 6));
    const drawing = s("svg", { viewBox: `0 ${-rise} ${width} ${128 + rise}`, class: "predict-line", role: "img",
      "aria-label": `${entries.length} guesses by their ratio to the answer; the list below has them all` });
    drawing.append(s("rect", { x: x(1 / FACTOR), y: -rise, width: x(FACTOR) - x(1 / FACTOR), height: 96 + rise, class: "predict-band" }));
    drawing.append(s("line", { x1: edge, x2: width - edge, y1: 96, y2: 96, class: "predict-axis" }));
    for (const [ratio, text] of [[0.01, "1/100"], [0.1, "1/10"], [1, "right"], [10, "10 times"], [100, "100 times"]]) {
      drawing.append(s("line", { x1: x(ratio), x2: x(ratio), y1: 92, y2: 100, class: "predict-axis" }),
        s("text", { x: x(ratio), y: 116, "text-anchor": "middle" }, text));
    }
    drawing.append(...dots);
    return drawing;
  }

  const lectureOf = (name) => name.split(".")[0];

  /** How the guesses fared, into `element`, now and after each change.

      prompts: all prompts of the course, [{name, lecture, title, href, question}], or [] where only guesses are known. */
  function report(element, prompts = []) {
    function draw() {
      const kept = guesses();
      const known = new Map(prompts.map((prompt) => [prompt.name, prompt]));
      const names = [...new Set([...known.keys(), ...Object.keys(kept).sort()])].filter((name) => kept[name] && "right" in kept[name]);
      const guessed = names.filter((name) => kept[name].guess !== null);
      const right = guessed.filter((name) => kept[name].right).length;
      const ratios = guessed.map((name) => kept[name].ratio).filter((ratio) => ratio > 0);
      const off = ratios.map((ratio) => Math.max(ratio, 1 / ratio)).sort((a, b) => a - b);
      const of = prompts.length ? ` of ${prompts.length}` : "";
      const parts = [h("p", { class: "predict-sum" },
        guessed.length === 0 ? `You have made no prediction yet${of ? `; the course asks for ${prompts.length}` : ""}.`
          : [h("b", {}, `${guessed.length}${of}`), " predictions made, ", h("b", {}, `${right}`), " of them right",
            off.length ? [". The typical number was off by a factor of ", h("b", {}, number(off[Math.floor(off.length / 2)], 2))] : null, "."])];
      if (ratios.length) parts.push(line(guessed.filter((name) => kept[name].ratio > 0).map((name) => [name, kept[name]])));
      const lectures = [...new Set([...prompts.map((prompt) => prompt.lecture), ...names.map(lectureOf)])];
      for (const lecture of lectures) {
        const mine = names.filter((name) => lectureOf(name) === lecture);
        const all = prompts.filter((prompt) => prompt.lecture === lecture);
        const title = all.length ? all[0].title : /^lab/.test(lecture) ? lecture.replace("lab", "Lab ") : `Lecture ${lecture}`;
        const count = all.length ? `${mine.length} of ${all.length} answered` : `${mine.length} answered`;
        parts.push(h("details", { class: "predict-lecture", open: mine.length > 0 },
          h("summary", {}, h("b", {}, title), ` ${count}`),
          h("ul", {}, (all.length ? all.map((prompt) => prompt.name) : mine).map((name) => row(kept[name], known.get(name))))));
      }
      if (Object.keys(kept).length) parts.push(h("p", {}, h("button", { type: "button", class: "predict-plain", onclick: forget }, "Forget all guesses")));
      element.replaceChildren(...parts);
    }

    function row(entry, prompt) {
      const question = prompt ? prompt.question : entry.question;
      const text = prompt && prompt.href ? h("a", { href: prompt.href }, question) : question;
      if (!entry) return h("li", {}, text);
      const said = entry.guess === null ? `no guess; the answer is ${entry.answer}`
        : `${entry.right ? "✓" : "✗"} you: ${entry.said}; the answer: ${entry.answer}${entry.ratio === undefined ? "" : `; ratio ${number(entry.ratio, 3)}`}`;
      return h("li", {}, text, h("span", { class: entry.right ? "predict-said predict-good" : "predict-said" }, said));
    }

    function forget() {
      if (root.confirm("Forget all guesses? The prompts will ask again.")) keep({});
    }

    root.addEventListener("mlf-predictions", draw);
    root.addEventListener("storage", draw); // another tab
    draw();
    return () => {
      root.removeEventListener("mlf-predictions", draw);
      root.removeEventListener("storage", draw);
    };
  }

  MLF.predict = { parse, read, mount, report, KEY };

  /* ---- a page of the site: <div class="predict" data-mark="..."></div> and then <details class="predict-held">...</details> ---- */

  function start() {
    const parts = [...document.querySelectorAll("div.predict[data-mark], details.predict-held")];
    const mounted = [...document.querySelectorAll("div.predict[data-mark]")].map((place) => {
      const above = place.previousElementSibling;
      const held = parts[parts.indexOf(place) + 1];
      held.classList.add("predict-script");
      return mount({
        mark: place.dataset.mark,
        box: place,
        list: () => (above && above.matches("ul") ? above : null),
        asking: () => [...place.parentElement.children].slice(0, [...place.parentElement.children].indexOf(place)),
        hold: (hidden) => {
          held.open = !hidden;
        },
        more: () => h("a", { class: "predict-more", href: place.dataset.all }, "Your predictions"),
      });
    });
    for (const change of ["storage", "mlf-predictions"]) {
      root.addEventListener(change, () => mounted.forEach((prompt) => prompt && prompt.refresh()));
    }
    const list = document.querySelector("div.predict-report[data-prompts]");
    if (list) report(list, JSON.parse(list.dataset.prompts));
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})(globalThis);
