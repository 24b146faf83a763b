/* Drawings of the living figures: SVG drawn at the width of the page's column, so that text keeps its size on a phone. What a
   plot shows is also said in words: its label, the reading under the slider, or the table beside it. */
(function (root) {
  "use strict";

  const MLF = (root.MLF = root.MLF || {});
  const { h, s } = MLF;
  const { quantity } = MLF.units;
  const MARGIN = { top: 24, right: 22, bottom: 42 };
  const NARROW = 480; // pixels below which labels are short
  const LETTER = 7; // pixels that a letter of a tick takes, at most

  /** A scale from values to pixels: {at, from, ticks}. */
  function axis({ low, high, log, unit }, start, end) {
    const turn = log ? Math.log10 : (value) => value;
    const [a, b] = [turn(low), turn(high)];
    const ticks = log ? logTicks(low, high, Math.abs(end - start), unit) : linearTicks(low, high, Math.abs(end - start));
    return {
      at: (value) => start + ((turn(value) - a) / (b - a)) * (end - start),
      from: (pixel) => {
        const value = a + ((pixel - start) / (end - start)) * (b - a);
        return log ? 10 ** value : value;
      },
      ticks,
    };
  }

  function logTicks(low, high, room, unit) {
    const decades = Math.log10(high / low);
    const step = Math.max(1, Math.ceil((decades * (unit ? 34 : 44)) / room));
    const ticks = [];
    for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * 1.000001; power += step) {
      ticks.push(Number(`1e${power}`));
    }
    if (ticks.length >= 3 || decades > 3) return ticks;
    const fine = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
      for (const lead of [1, 2, 5]) {
        const tick = Number(`${lead}e${power}`);
        if (tick >= low * 0.999999 && tick <= high * 1.000001) fine.push(tick);
      }
    }
    return fine;
  }

  function linearTicks(low, high, room) {
    const rough = (high - low) / Math.max(2, Math.floor(room / 84));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((lead) => lead * power).find((each) => each >= rough * 0.999);
    const ticks = [];
    for (let k = Math.ceil(low / step); k * step <= high * 1.000001; k += 1) ticks.push(k * step);
    return ticks;
  }

  /** Draw again whenever the host's width changes. */
  function atEachWidth(host, draw) {
    let width = 0;
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== width) draw((width = host.clientWidth));
    }).observe(host);
    root.addEventListener("beforeprint", () => host.clientWidth && draw(host.clientWidth));
  }

  class Figure {
    /** What draws itself into `host` again when its view or its width changes. A handle that has the focus keeps it. */
    constructor(host) {
      this.host = h("div", { class: "mlf-plot" });
      this.handles = new Map();
      host.append(this.host);
      atEachWidth(this.host, (width) => {
        this.measured = width;
        this.redraw();
      });
    }

    /** The host's width in pixels as it was last seen: to ask for it anew would lay out the page at each drawing. */
    get width() {
      return this.measured || this.host.clientWidth;
    }

    update(view) {
      this.view = view;
      this.redraw();
    }

    redraw() {
      const held = this.host.contains(document.activeElement) && document.activeElement.dataset.handle;
      this.draw();
      if (held) this.host.querySelector(`[data-handle="${held}"]`)?.focus({ preventScroll: true });
    }
  }

  class Drawing extends Figure {
    /** A drawing of one's own: `paint(width, view, drawing)` gives the SVG element. */
    constructor(host, paint) {
      super(host);
      this.paint = paint;
    }

    draw() {
      const { width } = this;
      if (this.view && width) this.host.replaceChildren(this.paint(width, this.view, this));
    }
  }

  const TOUCH = 22; // half the side of what a finger must hit, in pixels

  /** What can be dragged in a figure, and moved by the arrow keys: a slider for those who do not see it.

      `figure` is the Figure that draws it, `key` its name there. {x, y} is its place in the SVG, `axis` the direction it moves
      in ("x" or "y"), `value` its number, `values` the numbers it may have, in ascending order, or {least, most, step};
      `at(pixel)` is the value at a pixel along its axis, `change(value)` is called with the new one. `label` names it, `text`
      is the value in words. `children` draw it; else it is a knob. `room` is how wide it may be for a finger, in pixels. */
  function handle(figure, key, spec) {
    const { x, y, axis: along = "x", value, values, least, most, step, label, text, children, room = 2 * TOUCH } = spec;
    figure.handles.set(key, spec);
    const [low, high] = values ? [values[0], values[values.length - 1]] : [least, most];
    const grip = children || [s("circle", { class: "mlf-knob", cx: x, cy: y, r: 8 })];
    const element = s("g", { class: `mlf-handle mlf-along-${along}`, role: "slider", tabindex: 0, "data-handle": key, "aria-label": label,
      "aria-valuemin": low, "aria-valuemax": high, "aria-valuenow": value, "aria-valuetext": text,
      "aria-orientation": along === "x" ? "horizontal" : "vertical" },
    s("rect", { class: "mlf-touch", x: x - room / 2, y: y - TOUCH, width: room, height: 2 * TOUCH }), grip);
    const move = (to) => nearest(figure.handles.get(key), to);
    element.addEventListener("keydown", (event) => {
      const sign = { ArrowRight: 1, ArrowUp: 1, PageUp: 4, ArrowLeft: -1, ArrowDown: -1, PageDown: -4, Home: -Infinity, End: Infinity }[event.key];
      if (sign === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      if (!values) return move(Math.max(least, Math.min(most, value + sign * step)));
      const place = values.indexOf(values.reduce((best, each) => (Math.abs(each - value) < Math.abs(best - value) ? each : best)));
      return move(values[Math.max(0, Math.min(values.length - 1, place + sign))]);
    });
    element.addEventListener("pointerdown", (event) => drag(figure, key, event, move));
    return element;
  }

  /** Hand the allowed value nearest to `to` to the handle's `change`, if it is another than the present one. */
  function nearest({ value, values, least, most, step, change }, to) {
    const found = values
      ? values.reduce((best, each) => (Math.abs(each - to) < Math.abs(best - to) ? each : best))
      : Math.max(least, Math.min(most, Number((least + Math.round((to - least) / step) * step).toPrecision(12))));
    if (found !== value && !Number.isNaN(found)) change(found);
  }

  /** Follow the pointer until it is let go; the handle is drawn anew on the way, so the window is what listens. */
  function drag(figure, key, begin, move) {
    if (begin.button) return;
    begin.preventDefault();
    figure.host.querySelector(`[data-handle="${key}"]`).focus({ preventScroll: true });
    let [waiting, last] = [false, begin];
    const follow = (event) => {
      if (event.pointerId !== begin.pointerId) return;
      last = event;
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        const { axis: along = "x", at } = figure.handles.get(key);
        const box = figure.host.getBoundingClientRect();
        move(at(along === "x" ? last.clientX - box.left : last.clientY - box.top));
      });
    };
    const end = (event) => {
      if (event.pointerId !== begin.pointerId) return;
      for (const [name, act] of [["pointermove", follow], ["pointerup", end], ["pointercancel", end]]) root.removeEventListener(name, act);
    };
    for (const [name, act] of [["pointermove", follow], ["pointerup", end], ["pointercancel", end]]) root.addEventListener(name, act);
  }

  class Plot extends Figure {
    /** A plot with axes in `host`; `update(view)` draws {label, height, margin, x, y, areas, lines, marks, points}, and
        what `over(plot)` gives, such as handles. `margin` is the room to the right of the axes where there is some. */
    probed = null;

    draw() {
      const { width } = this;
      if (!this.view || !width) return;
      const { view } = this;
      this.narrow = width < NARROW;
      const height = view.height || 320;
      this.roomy = width >= 600;
      const margin = (this.roomy && view.margin) || MARGIN.right;
      this.y = axis(view.y, height - MARGIN.bottom, MARGIN.top);
      const left = Math.max(this.narrow ? 0 : 64, 14 + LETTER * Math.max(...this.y.ticks.map((tick) => quantity(tick, view.y.unit || "", 3).length)));
      this.x = axis(view.x, left, width - margin);
      this.box = { left, right: width - margin, top: MARGIN.top, bottom: height - MARGIN.bottom };
      this.cursor = s("g", { class: "mlf-cursor" });
      const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: view.over ? "group" : "img", "aria-label": view.label },
        this.grid(width, height), (view.areas || []).map((area) => this.area(area)),
        (view.lines || []).map((line) => this.line(line)), (view.marks || []).map((mark) => this.mark(mark)),
        this.cursor, (view.points || []).map((point) => this.point(point)), view.over ? view.over(this) : []);
      this.host.replaceChildren(svg);
      this.probe(this.probed);
    }

    grid(width, height) {
      const { x, y, box, view } = this;
      const group = s("g", { class: "mlf-axes" });
      for (const tick of x.ticks) {
        const at = x.at(tick);
        group.append(s("line", { class: "mlf-gridline", x1: at, x2: at, y1: box.top, y2: box.bottom }),
          this.tick(at, box.bottom + 17, quantity(tick, view.x.unit || "", 3), width));
      }
      for (const tick of y.ticks) {
        const at = y.at(tick);
        group.append(s("line", { class: "mlf-gridline", x1: box.left, x2: box.right, y1: at, y2: at }),
          s("text", { x: box.left - 8, y: at + 4, "text-anchor": "end" }, quantity(tick, view.y.unit || "", 3)));
      }
      group.append(s("line", { class: "mlf-axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
        s("text", { x: box.right, y: height - 6, "text-anchor": "end" }, view.x.name),
        s("text", { x: box.left, y: 12 }, view.y.name));
      return group;
    }

    /** A number below the axis, moved to the left where it would be cut off. */
    tick(at, y, text, width) {
      const cut = at + (LETTER * text.length) / 2 > width;
      return s("text", { x: cut ? width : at, y, "text-anchor": cut ? "end" : "middle" }, text);
    }

    area({ from, to, className, label }) {
      const { box } = this;
      const a = Math.max(box.left, Math.min(box.right, this.x.at(from)));
      const b = Math.max(box.left, Math.min(box.right, this.x.at(to)));
      if (b - a < 0.5) return null;
      const text = label && b - a > LETTER * label.length + 10 ? s("text", { x: b - 6, y: box.bottom - 8, "text-anchor": "end", class: "mlf-area-name" }, label) : null;
      return s("g", {}, s("rect", { class: className, x: a, y: box.top, width: b - a, height: box.bottom - box.top }), text);
    }

    line({ points, className, label, title }) {
      const path = points.map(([x, y]) => `${this.x.at(x).toFixed(2)},${this.y.at(y).toFixed(2)}`).join(" ");
      const group = s("g", {}, s("polyline", { class: `mlf-line ${className}`, points: path }, title ? s("title", {}, title) : null));
      if (label) {
        const [x, y] = [this.x.at(label.x), this.y.at(label.y)];
        const anchor = label.anchor || "end";
        group.append(s("text", { class: `mlf-label ${label.className || ""}`, x: x + (label.dx || 0), y: y + (label.dy ?? -6), "text-anchor": anchor }, this.narrow && label.short ? label.short : label.text));
      }
      return group;
    }

    /** A vertical line at `x`, named at its top or bottom; its name goes to the side that has room. */
    mark({ x, className, label, low }) {
      const { box } = this;
      const at = this.x.at(x);
      if (!(at >= box.left - 0.5 && at <= box.right + 0.5)) return null;
      const isLast = box.right - at < LETTER * (label || "").length + 8; // no room to the right of the line
      return s("g", {}, s("line", { class: `mlf-mark ${className || ""}`, x1: at, x2: at, y1: box.top, y2: box.bottom }),
        label ? s("text", { class: "mlf-label mlf-mark-name", x: at + (isLast ? -6 : 6), y: low ? box.bottom - 8 : box.top + 10, "text-anchor": isLast ? "end" : "start" }, label) : null);
    }

    /** A point with its name: to its upper left where there is room, or `below` it, where a line above it has a name. */
    point({ x, y, className, label, below }) {
      const [px, py] = [this.x.at(x), this.y.at(y)];
      const room = LETTER * (label || "").length + 16;
      const left = below ? px + room > this.box.right : px - this.box.left > room;
      return s("g", {}, s("circle", { class: `mlf-point ${className || ""}`, cx: px, cy: py, r: 6 }),
        label ? s("text", { class: "mlf-label mlf-strong", x: px + (left ? -9 : 9), y: py + (left && !below ? -11 : 21), "text-anchor": left ? "end" : "start" }, label) : null);
    }

    /** Show where the slider stands: a line at `x` and a ring on each of its values. */
    probe(found) {
      this.probed = found;
      if (!this.cursor) return;
      if (!found) return this.cursor.replaceChildren();
      const { box } = this;
      const at = this.x.at(found.x);
      this.cursor.replaceChildren(s("line", { x1: at, x2: at, y1: box.top, y2: box.bottom }),
        ...found.ys.filter(Number.isFinite).map((y) => s("circle", { cx: at, cy: this.y.at(y), r: 4 })));
    }
  }

  const STEPS = 400;

  class Probe {
    /** A slider that reads off `plots` with a common x axis; the pointer over a plot moves it too. */
    constructor(host, plots, name, id) {
      this.plots = plots;
      this.input = h("input", { type: "range", min: 0, max: STEPS, step: 1, value: STEPS / 2, id, oninput: () => this.say() });
      this.output = h("output", { for: id, class: "mlf-reading", "aria-live": "off" });
      host.append(h("div", { class: "mlf-probe" }, h("label", { for: id }, name), this.input, this.output));
      for (const plot of plots) {
        plot.host.addEventListener("pointermove", (event) => this.point(plot, event));
        plot.host.addEventListener("pointerdown", (event) => this.point(plot, event));
      }
    }

    point(plot, event) {
      if (!plot.box) return;
      const { left, right } = plot.box;
      const share = (event.clientX - plot.host.getBoundingClientRect().left - left) / (right - left);
      if (share < 0 || share > 1) return;
      this.input.value = Math.round(STEPS * share);
      this.say();
    }

    /** `read(x)` gives {x, ys: one list a plot, text}; `x` is the common axis {low, high}, logarithmic; the slider
        goes to `begin`. */
    update(x, read, begin) {
      [this.x, this.read] = [x, read];
      this.input.value = Math.round((STEPS * Math.log(begin / x.low)) / Math.log(x.high / x.low));
      this.say(begin);
    }

    say(at) {
      const { low, high } = this.x;
      const found = this.read(at ?? low * (high / low) ** (Number(this.input.value) / STEPS));
      this.output.textContent = found.text;
      this.input.setAttribute("aria-valuetext", found.text);
      this.plots.forEach((plot, i) => plot.probe({ x: found.x, ys: found.ys[i] }));
    }
  }

  class Bars extends Figure {
    /** Stacked bars, one below the other, against a limit: `update({label, bars, limit, unit})`. */
    draw() {
      const { width } = this;
      if (!this.view || !width) return;
      const { bars, limit, label } = this.view;
      const [left, right, top, thick, gap] = [62, 82, 30, 28, 18];
      const bottom = top + bars.length * (thick + gap);
      const most = Math.max(...bars.map((bar) => bar.total));
      const high = Math.min(Math.max(most, limit.value * 1.15), 4 * limit.value);
      const x = axis({ low: 0, high, log: false }, left, width - right);
      const svg = s("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, width, height: bottom + 26, role: "img", "aria-label": label });
      for (const tick of x.ticks) {
        svg.append(s("line", { class: "mlf-gridline", x1: x.at(tick), x2: x.at(tick), y1: top - 4, y2: bottom - gap / 2 }),
          s("text", { class: "mlf-tick", x: x.at(tick), y: bottom + 8, "text-anchor": "middle" }, quantity(tick, "B", 3)));
      }
      bars.forEach((bar, i) => this.bar(svg, bar, x, top + i * (thick + gap), thick, high));
      const at = x.at(limit.value);
      const anchor = at > width - 130 ? "end" : "middle";
      svg.append(s("line", { class: "mlf-limit", x1: at, x2: at, y1: top - 8, y2: bottom - gap / 2 }),
        s("text", { class: "mlf-label mlf-strong", x: at, y: top - 13, "text-anchor": anchor }, limit.name));
      this.host.replaceChildren(svg);
    }

    bar(svg, bar, x, y, thick, high) {
      const [start, end] = [x.at(0), x.at(high)];
      svg.append(s("text", { class: `mlf-label ${bar.chosen ? "mlf-strong" : ""}`, x: start - 8, y: y + thick / 2 + 4, "text-anchor": "end" }, bar.name));
      let sum = 0;
      for (const part of bar.parts) {
        const [a, b] = [x.at(Math.min(sum, high)), x.at(Math.min(sum + part.value, high))];
        sum += part.value;
        if (b - a < 0.2) continue;
        svg.append(s("rect", { class: `mlf-part mlf-${part.name} ${b - a > 6 ? "" : "mlf-thin-part"}`, x: a, y, width: b - a, height: thick },
          s("title", {}, `${bar.name}, ${part.name}: ${quantity(part.value, "B", 4)}`)));
      }
      svg.append(s("rect", { class: "mlf-outline", x: start, y, width: x.at(Math.min(sum, high)) - start, height: thick }));
      if (bar.chosen) svg.append(s("rect", { class: "mlf-frame", x: start - 2, y: y - 3, width: x.at(Math.min(sum, high)) - start + 4, height: thick + 6, rx: 3 }));
      const cut = sum > high;
      const text = `${cut ? "→ " : ""}${quantity(sum, "B", 3)}`;
      svg.append(s("text", { class: `mlf-label ${bar.fits ? "" : "mlf-over"} ${bar.chosen ? "mlf-strong" : ""}`, x: (cut ? end : x.at(sum)) + 8, y: y + thick / 2 + 4 }, text));
    }
  }

  Object.assign(MLF, { axis, Drawing, Plot, Probe, Bars, handle });
})(globalThis);
