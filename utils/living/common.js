/* What the living figures share: the figure first, a form from a list of fields beside it, messages at the fields, results that
   are withdrawn while an input is wrong, steps that are played or taken one by one, and a setting that lives in the address
   (#gpu=H100&batch=16), so that it can be linked, where the figure has a page of its own. */
(function (root) {
  "use strict";

  const MLF = (root.MLF = root.MLF || {});
  const { parseWhole, parseNumber } = MLF.units;

  /* ---- elements ---- */

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
    return element;
  }

  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  /* ---- pieces of results ---- */

  /** A list of named figures: [name, value, what it is]. */
  function facts(entries) {
    return entries.map(([name, value, note]) =>
      h("div", { class: "mlf-fact" }, h("dt", {}, name), h("dd", {}, value), note ? h("dd", { class: "mlf-note" }, note) : null),
    );
  }

  /** A caption and a table in a box that scrolls by itself: a row's first cell is its head; `strong` is the row to stress. */
  function table(caption, heads, rows, strong = -1) {
    const body = rows.map((row, i) =>
      h("tr", i === strong ? { class: "mlf-chosen", "aria-current": "true" } : {},
        row.map((cell, k) => h(k ? "td" : "th", k ? {} : { scope: "row" }, cell))),
    );
    return [h("p", { class: "mlf-caption", "aria-hidden": "true" }, caption),
      h("div", { class: "mlf-scroll", tabindex: "0", role: "region", "aria-label": caption },
        h("table", { class: "mlf-table", "aria-label": caption },
          h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, body)))];
  }

  /** The figures that a result rests on, with the source of each: [what, value, source]. */
  function sources(entries) {
    return h("details", { class: "mlf-sources" }, h("summary", {}, "The figures used here, and who says so"),
      h("dl", {}, entries.map(([what, value, source]) => [
        h("dt", {}, `${what}: `, h("strong", {}, value)), h("dd", {}, source)])));
  }

  /* ---- fields ---- */

  const idOf = (key, field) => `mlf-${key}-${field.id}`;

  function options(field) {
    const groups = new Map();
    for (const option of field.options) {
      if (!groups.has(option.group)) groups.set(option.group, []);
      groups.get(option.group).push(h("option", { value: option.value }, option.text));
    }
    return [...groups].map(([label, each]) => (label ? h("optgroup", { label }, each) : each));
  }

  function control(name, field) {
    const id = idOf(name, field);
    const described = `${field.hint ? `${id}-hint ` : ""}${id}-error`;
    const shared = { id, name: field.id, "aria-describedby": described };
    if (field.kind === "choice") return h("select", shared, options(field));
    if (field.kind === "flag") return h("input", { ...shared, type: "checkbox" });
    if (field.lines) return h("textarea", { ...shared, rows: field.lines, autocomplete: "off", spellcheck: "false", maxlength: 400 });
    const more = { type: "text", autocomplete: "off", spellcheck: "false", maxlength: field.kind === "text" ? "400" : "60" };
    return h("input", { ...shared, ...more });
  }

  const isNumber = (field) => field.kind === "whole" || field.kind === "number";

  function row(name, field, input) {
    const id = idOf(name, field);
    const label = h("label", { for: id }, field.label, field.unit ? h("span", { class: "mlf-unit" }, ` ${field.unit}`) : null);
    const hint = field.hint ? h("p", { class: "mlf-hint", id: `${id}-hint` }, field.hint) : null;
    const error = h("p", { class: "mlf-error", id: `${id}-error`, role: "status" });
    const meant = isNumber(field) ? h("p", { class: "mlf-hint mlf-meant" }) : null;
    const parts = field.kind === "flag" ? [h("div", { class: "mlf-flag" }, input, label)] : [label, input];
    return h("div", { class: `mlf-field mlf-${field.kind}${field.wide ? " mlf-wide" : ""}` }, ...parts, hint, meant, error);
  }

  /** The value of a field from what was typed or chosen; throws InputError. */
  function parse(field, text) {
    if (field.kind === "flag") return text === "1";
    if (field.kind === "whole") return parseWhole(field.id, text, field.least ?? 1, field.most);
    if (field.kind === "number") return parseNumber(field.id, text, field.least, field.most);
    if (field.kind === "text") return field.parse ? field.parse(text) : text;
    if (!field.options.some((option) => option.value === text)) {
      throw new MLF.InputError(field.id, `The link asks for “${text.slice(0, 24)}”, which is not in this list. Choose another.`);
    }
    return text;
  }

  const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

  /* ---- steps ---- */

  const ICONS = {
    first: "M13 2L5 8l8 6zM3 2h2v12H3z", back: "M11 3L4 8l7 5z", play: "M4 2l10 6-10 6z", pause: "M3 2h4v12H3zM9 2h4v12H9z",
    forward: "M5 3l7 5-7 5z",
  };
  const PERIOD = 800; // milliseconds a step is shown while the figure plays

  const icon = (name) => s("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", focusable: "false" },
    s("path", { fill: "currentColor", d: ICONS[name] }));

  class Player {
    /** Buttons, a slider and a line of text for a figure of several steps; `show(step)` shows one and gives its words. */
    constructor(title, id, show) {
      [this.show, this.step, this.last] = [show, 0, 0];
      const button = (name, label, act) => h("button", { type: "button", "aria-label": label, title: label, onclick: act }, icon(name));
      this.toggle = button("play", "Play", () => (this.timer ? this.pause() : this.play()));
      this.slider = h("input", { type: "range", min: 0, max: 0, step: 1, value: 0, id, "aria-label": "step",
        oninput: () => this.go(Number(this.slider.value)) });
      this.text = h("output", { for: id, class: "mlf-reading", "aria-live": "polite" });
      this.element = h("div", { class: "mlf-player", role: "group", "aria-label": `${title}: steps`, onkeydown: (event) => this.key(event) },
        h("div", { class: "mlf-player-bar" }, button("first", "Back to the start", () => this.go(0)),
          button("back", "One step back", () => this.go(this.step - 1)), this.toggle,
          button("forward", "One step forward", () => this.go(this.step + 1)), this.slider), this.text);
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target === this.slider) return;
      const to = { ArrowRight: this.step + 1, ArrowLeft: this.step - 1, Home: 0, End: this.last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.go(to);
    }

    /** Show `step`, or the nearest there is; what plays stops. */
    go(step) {
      this.pause();
      this.at(step);
    }

    at(step) {
      this.step = Math.max(0, Math.min(this.last, step));
      this.slider.value = this.step;
      const said = this.show(this.step) || `Step ${this.step} of ${this.last}`;
      this.text.textContent = said;
      this.slider.setAttribute("aria-valuetext", said);
    }

    update(last) {
      const isOver = this.last > 0 && this.step === this.last; // who has seen the end sees it of the new setting, too
      this.last = last;
      this.slider.max = last;
      if (this.timer && this.step >= last) this.pause();
      this.at(isOver ? last : this.step);
    }

    face(name, label) {
      this.toggle.replaceChildren(icon(name));
      this.toggle.setAttribute("aria-label", label);
      this.toggle.title = label;
      this.text.setAttribute("aria-live", name === "pause" ? "off" : "polite");
    }

    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.face("play", "Play");
    }

    play() {
      if (this.step >= this.last) this.at(0);
      this.face("pause", "Pause");
      this.timer = setInterval(() => {
        if (!this.element.isConnected || this.step >= this.last) return this.pause();
        this.at(this.step + 1);
        if (this.step >= this.last) this.pause();
      }, PERIOD);
    }
  }

  /* ---- a living figure ---- */

  const started = (MLF.started = MLF.started || new Map()); // how many figures of each name this page has

  class Living {
    /** `plan`: {name, title, groups: [{legend, fields}], compute(values) -> results,
        build(host, act) -> show(values, results, step) -> words of the step, steps?(values, results) -> last step,
        changed?(id, text) -> further texts}. `act.set(id, value)` or `act.set({id: value, ...})` changes fields from the figure itself, `act.player` is
        the bar of steps, for build to put below its drawing, `act.go(step)` goes to one, and `act.key` is the figure's name, unlike that of others on its page; `begin` is the step that is shown first. A field may have a `slider`,
        a function of all texts that lists the numbers it slides over. */
    constructor(host, plan) {
      [this.plan, this.host] = [plan, host];
      const count = (started.get(plan.name) || 0) + 1;
      started.set(plan.name, count);
      this.count = count;
      this.key = count > 1 ? `${plan.name}-${count}` : plan.name;
      this.given = JSON.parse(host.dataset.settings || "{}");
      this.linked = !("settings" in host.dataset); // on a page of its own; embedded in a lecture the address is the lecture's
      this.fields = plan.groups.flatMap((group) => group.fields);
      this.inputs = new Map(this.fields.map((field) => [field.id, control(this.key, field)]));
      this.rows = new Map(this.fields.map((field) => [field.id, row(this.key, field, this.inputs.get(field.id))]));
      this.sliders = new Map(this.fields.filter((field) => field.slider).map((field) => [field, this.slider(field)]));
      this.text = this.initial();
      this.notice = h("p", { class: "mlf-notice", role: "status" });
      this.results = h("div", { class: "mlf-results" });
      this.said = h("span", { class: "mlf-said", role: "status" });
      host.replaceChildren(h("div", { class: "mlf-body" }, h("div", { class: "mlf-main" }, this.notice, this.results), this.form()));
      this.player = plan.steps ? new Player(plan.title, `mlf-${this.key}-step`, (step) => this.show(...this.found, step)) : null;
      this.show = plan.build(this.results, { set: (id, value) => this.set(id, value), player: this.player && this.player.element, go: (step) => this.player.go(step), key: this.key });
      if (this.player && !this.player.element.isConnected) this.results.append(this.player.element);
      if (this.player) this.player.step = Number(this.given.step ?? plan.begin ?? 0);
      if (this.linked) {
        this.read(location.hash);
        root.addEventListener("hashchange", () => this.follow());
      }
      this.update();
    }

    initial() {
      return Object.fromEntries(this.fields.map((field) => [field.id, String(this.given[field.id] ?? field.initial)]));
    }

    /** A slider below a field's text, over the numbers that `field.slider(text)` lists. */
    slider(field) {
      const range = h("input", { type: "range", min: 0, step: 1, class: "mlf-slide", "aria-label": `${field.label}, slider`,
        oninput: () => this.set(field.id, field.slider(this.text)[Number(range.value)]) });
      this.inputs.get(field.id).after(range);
      return range;
    }

    /** Change a field from the figure, or several: what a handle was dragged to. */
    set(id, value) {
      const asked = Object.entries(typeof id === "object" ? id : { [id]: value });
      const texts = asked.map(([key, each]) => [key, typeof each === "boolean" ? String(Number(each)) : String(each)]);
      if (texts.every(([key, each]) => this.text[key] === each)) return;
      Object.assign(this.text, Object.fromEntries(texts));
      this.changed(texts.length > 1 ? "" : id);
    }

    form() {
      const groups = this.plan.groups.map((group) =>
        h("fieldset", {}, h("legend", {}, group.legend),
          h("div", { class: "mlf-grid" }, group.fields.map((field) => this.rows.get(field.id)))));
      const form = h("form", { class: "mlf-form", novalidate: true, "aria-label": this.count > 1 ? `${this.plan.title}, ${this.count}` : this.plan.title }, groups,
        h("div", { class: "mlf-actions" },
          this.linked ? h("button", { type: "button", onclick: () => this.copy() }, "Copy link") : null,
          h("button", { type: "reset" }, "Start again"), this.said));
      form.addEventListener("submit", (event) => event.preventDefault());
      form.addEventListener("reset", (event) => {
        event.preventDefault();
        this.text = this.initial();
        this.changed("");
      });
      form.addEventListener("input", (event) => this.typed(event.target));
      return form;
    }

    typed(input) {
      if (!this.inputs.has(input.name)) return;
      this.text[input.name] = input.type === "checkbox" ? (input.checked ? "1" : "0") : input.value;
      this.changed(input.name);
    }

    changed(id) {
      if (this.plan.changed && id) Object.assign(this.text, this.plan.changed(id, this.text) || {});
      this.update();
      if (!this.linked) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.write(), 120);
    }

    active() {
      return this.fields.filter((field) => !field.when || field.when(this.text));
    }

    /** Take the setting from an address; what it does not name is as at the start. */
    read(hash) {
      const asked = new URLSearchParams(hash.slice(1));
      this.text = this.initial();
      if (![...asked.keys()].some((key) => this.inputs.has(key))) return false;
      for (const [key, value] of asked) if (this.inputs.has(key)) this.text[key] = value;
      return true;
    }

    follow() {
      if (!this.read(location.hash)) return;
      this.update();
      const calm = root.matchMedia("(prefers-reduced-motion: reduce)").matches;
      this.host.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
    }

    address() {
      return `#${new URLSearchParams(this.active().map((field) => [field.id, this.text[field.id]]))}`;
    }

    write() {
      clearTimeout(this.timer);
      try {
        root.history.replaceState(null, "", this.address());
      } catch {
        /* a browser that counts such calls refuses some; the next change writes again */
      }
    }

    async copy() {
      this.write();
      try {
        await root.navigator.clipboard.writeText(location.href);
        this.said.textContent = "Copied.";
      } catch {
        this.said.textContent = "The address bar has the link.";
      }
      setTimeout(() => (this.said.textContent = ""), 4000);
    }

    /** Values and messages of the fields that count now. */
    values() {
      const [values, wrong] = [{}, new Map()];
      for (const field of this.active()) {
        try {
          values[field.id] = parse(field, this.text[field.id]);
        } catch (error) {
          if (!(error instanceof MLF.InputError)) throw error;
          wrong.set(field.id, error.message);
        }
      }
      return [values, wrong];
    }

    update() {
      this.said.textContent = "";
      const [values, wrong] = this.values();
      let results = null;
      if (!wrong.size) {
        try {
          results = this.plan.compute(values);
        } catch (error) {
          if (!(error instanceof MLF.InputError)) throw error;
          wrong.set(this.inputs.has(error.field) ? error.field : this.fields[0].id, sentence(error.message));
        }
      }
      this.mirror(wrong);
      this.withdraw(wrong);
      if (wrong.size) return this.player && this.player.pause();
      this.found = [values, results];
      if (this.player) this.player.update(this.plan.steps(values, results));
      else this.show(values, results);
    }

    /** Put texts and messages into the form. */
    mirror(wrong) {
      const active = new Set(this.active());
      for (const field of this.fields) {
        const [input, message] = [this.inputs.get(field.id), wrong.get(field.id) || ""];
        const text = this.text[field.id];
        if (field.kind === "flag") input.checked = text === "1";
        else if (input.value !== text) input.value = text;
        this.rows.get(field.id).hidden = !active.has(field);
        if (message) input.setAttribute("aria-invalid", "true");
        else input.removeAttribute("aria-invalid");
        const meant = this.rows.get(field.id).querySelector(".mlf-meant");
        if (meant) meant.textContent = message ? "" : MLF.units.meant(text);
        const error = this.rows.get(field.id).querySelector(".mlf-error");
        if (error.textContent !== message) error.textContent = message;
        if (this.sliders.has(field) && !message) this.slide(field, Number(parse(field, text)));
      }
    }

    slide(field, value) {
      const [range, values] = [this.sliders.get(field), field.slider(this.text)];
      range.max = values.length - 1;
      range.value = values.findLastIndex((each) => each <= value);
      range.setAttribute("aria-valuetext", String(value));
    }

    withdraw(wrong) {
      const names = this.fields.filter((field) => wrong.has(field.id)).map((field) => field.label.toLowerCase());
      const hide = wrong.size > 0;
      if (hide && !this.results.hidden) this.notice.style.minHeight = `${this.results.offsetHeight}px`; // nothing jumps
      if (!hide) this.notice.style.minHeight = "";
      this.results.hidden = hide;
      this.notice.hidden = !hide;
      this.notice.textContent = hide ? `No result: look at ${names.join(" and ")}.` : "";
    }
  }

  /** Start the figure `plan` wherever the page has a place for it: at once, or as soon as its notebook shows it. */
  function start(plan, tries = 20) {
    const hosts = [...document.querySelectorAll(`[data-living="${plan.name}"]:not([data-ready])`)];
    for (const host of hosts) {
      host.setAttribute("data-ready", "");
      new Living(host, plan);
    }
    if (!hosts.length && tries) requestAnimationFrame(() => start(plan, tries - 1));
    MLF.figures = { ...MLF.figures, [plan.name]: plan };
  }

  Object.assign(MLF, { h, s, facts, table, sources, parse, start });
})(globalThis);
