/* The online-softmax bench: a row of scores, read tile by tile, with the running maximum, the running sum and the factor that
   repairs it; what each score contributes is drawn, so that a forgotten factor is seen. */
(function (root) {
  "use strict";

  const { MLF } = root;
  const { h, s } = MLF;
  const { number } = MLF.units;

  const MOST = 32;
  const LARGEST = 1e6;
  const TOKEN = /^[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?$/;

  /** The scores that a reader typed: numbers with commas or blanks between them, "-inf" for a masked one. */
  function parseScores(text) {
    const tokens = text.replaceAll("−", "-").replaceAll("∞", "inf").split(/[\s,;]+/).filter(Boolean);
    if (!tokens.length) throw new MLF.InputError("scores", "Enter some scores, such as 1, -2, 0.5.");
    if (tokens.length > MOST) throw new MLF.InputError("scores", `At most ${MOST} scores, not ${tokens.length}.`);
    const scores = tokens.map((token) => {
      if (/^-inf(inity)?$/i.test(token)) return -Infinity;
      if (!TOKEN.test(token)) throw new MLF.InputError("scores", `Enter numbers with commas between them; “${token.slice(0, 24)}” is none.`);
      return Number(token);
    });
    if (!scores.some(Number.isFinite)) throw new MLF.InputError("scores", "At least one score must be finite: a row that is all masked has no softmax.");
    if (scores.some((score) => Math.abs(score) > LARGEST && score !== -Infinity)) {
      throw new MLF.InputError("scores", `Scores must lie between −${number(LARGEST)} and ${number(LARGEST)}.`);
    }
    return scores;
  }

  const groups = [
    {
      legend: "Row",
      fields: [
        { id: "scores", label: "Scores", kind: "text", parse: parseScores, initial: "-29, -30, -20, -20", wide: true,
          hint: "up to 32 numbers; -inf is a masked score" },
        { id: "tile", label: "Tile, in scores", kind: "whole", initial: "2", least: 1, most: MOST },
      ],
    },
    { legend: "Recurrence", fields: [{ id: "rescale", label: "rescale the old sum", kind: "flag", initial: "1" }] },
  ];

  const above = (score, reference) => (score === -Infinity ? 0 : Math.exp(score - reference));

  /** The state after each tile by equation (7) of lecture 05, and the weights of the second pass. */
  function compute({ scores, tile, rescale }) {
    const size = Number(tile);
    const highest = Math.max(...scores);
    let [m, d] = [-Infinity, 0];
    const steps = [];
    for (let start = 0; start < scores.length; start += size) {
      const part = scores.slice(start, start + size);
      const [before, old] = [m, d];
      m = Math.max(m, ...part);
      const factor = before === -Infinity ? 0 : above(before, m);
      const added = part.reduce((sum, score) => sum + above(score, m), 0);
      d = old * (rescale ? factor : 1) + added;
      const right = scores.slice(0, start + size).reduce((sum, score) => sum + above(score, m), 0);
      steps.push({ start, end: Math.min(start + size, scores.length), before, m, factor, old, added, d, right });
    }
    const total = scores.reduce((sum, score) => sum + above(score, highest), 0);
    return {
      steps,
      weights: scores.map((score) => above(score, m) / d),
      exact: scores.map((score) => above(score, highest) / total),
    };
  }

  /* ---- what is shown ---- */

  const plain = (value) => (value === -Infinity ? "−∞" : number(value, 7));
  const rough = (value) => (value === -Infinity ? "−∞" : number(value, 4));

  function words({ scores, rescale }, { steps, weights }, step) {
    if (!step) return "Nothing is read yet: m = −∞ and d = 0.";
    if (step > steps.length) {
      const sum = weights.reduce((a, b) => a + b, 0);
      const wrong = Math.abs(sum - 1) > 1e-9;
      return `Second pass: each tile is read again and e^(x − m) / d is written. The ${scores.length} weights sum to ${plain(sum)}` +
        (wrong ? ", not to 1: the old sum was never rescaled." : ".");
    }
    const { before, m, factor, old, added, d, right } = steps[step - 1];
    const read = `Tile ${step} of ${steps.length} is read`;
    if (before === -Infinity) return m === -Infinity ? `${read}: all of it is masked, so m stays −∞ and d stays 0.` : `${read}: m = ${rough(m)}, and its terms sum to d = ${rough(d)}.`;
    if (m === before) return `${read}. The maximum stays ${rough(m)}, so the factor is 1. The tile adds ${rough(added)}: d = ${rough(d)}.`;
    const rise = `${read}. The maximum rises from ${rough(before)} to ${rough(m)}`;
    if (rescale) return `${rise}, so the old sum ${rough(old)} is multiplied by e^(${rough(before)} − ${m < 0 ? `(${rough(m)})` : rough(m)}) = ${rough(factor)}. The tile adds ${rough(added)}: d = ${plain(d)}.`;
    return `${rise}, but the old sum ${rough(old)} is kept as it is. The tile adds ${rough(added)}: d = ${plain(d)} instead of ${plain(right)}.`;
  }

  /** Lowest and highest value of the axis of scores: multiples of five around the finite ones. */
  function range(scores) {
    const finite = scores.filter(Number.isFinite);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const unit = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, high - low))) - 1);
    return { low: Math.floor((low - unit) / (5 * unit)) * 5 * unit, high: Math.ceil((high + unit) / (5 * unit)) * 5 * unit, log: false, step: unit / 2 };
  }

  /** What each score adds to d after `step` tiles; without rescaling a term keeps the reference of its own tile. */
  function terms({ scores, rescale }, { steps }, step) {
    const now = steps[step - 1];
    return scores.map((score, i) => {
      const own = steps.findIndex(({ end }) => i < end);
      if (own >= step) return null;
      const [held, right] = [above(score, rescale ? now.m : steps[own].m), above(score, now.m)];
      return { held, right };
    });
  }

  const HEAD = 22; // pixels above a panel, for its title

  function paint(width, { values, results, step, act }, drawing) {
    const { scores } = values;
    const { steps } = results;
    const [left, right, top, upper, gap, lower] = [52, 8, HEAD, 170, 52, 110];
    const base = top + upper;
    const floor = base + gap + lower;
    const column = (width - left - right) / scores.length;
    const middle = (i) => left + (i + 0.5) * column;
    const y = range(scores);
    const axis = MLF.axis(y, base, top);
    const at = Math.min(step, steps.length);
    const done = step > steps.length;
    const svg = s("svg", { viewBox: `0 0 ${width} ${floor + 22}`, width, height: floor + 22, role: "group",
      "aria-label": `Scores ${scores.map(rough).join(", ")} in ${steps.length} tiles. ${words(values, results, step)}` });
    steps.forEach(({ start, end }, k) => {
      const kind = k === at - 1 && !done ? "mlf-tile-now" : k < at ? "mlf-tile-read" : "mlf-tile-ahead";
      const box = { x: left + start * column + 1, width: (end - start) * column - 2 };
      svg.append(s("rect", { class: `mlf-tile ${kind}`, ...box, y: top, height: upper }),
        s("rect", { class: `mlf-tile ${k < at ? "mlf-tile-read" : "mlf-tile-ahead"}`, ...box, y: base + gap, height: lower }));
      if (column * (end - start) > 44) svg.append(s("text", { x: box.x + box.width / 2, y: base + 16, "text-anchor": "middle" }, `tile ${k + 1}`));
    });
    svg.append(s("text", { class: "mlf-strong mlf-label", x: 0, y: 13 }, "Scores: drag them"));
    for (const tick of axis.ticks) {
      svg.append(s("line", { class: "mlf-gridline", x1: left, x2: width - right, y1: axis.at(tick), y2: axis.at(tick) }),
        s("text", { x: left - 8, y: axis.at(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    scores.forEach((score, i) => svg.append(stem(score, i)));
    if (at && steps[at - 1].m !== -Infinity) svg.append(running());
    svg.append(...sums());
    return svg;

    function stem(score, i) {
      const isFinite = Number.isFinite(score);
      const end = isFinite ? axis.at(score) : base - 2;
      const read = i < (at ? steps[at - 1].end : 0);
      const knob = s("circle", { class: `mlf-knob ${read ? "mlf-hbm-knob" : ""}`, cx: middle(i), cy: end, r: Math.max(4, Math.min(8, column / 3)) });
      return s("g", {}, s("line", { class: `mlf-stem ${read ? "mlf-read" : ""}`, x1: middle(i), x2: middle(i), y1: base, y2: end }),
        column > 38 ? s("text", { class: "mlf-label", x: middle(i), y: end - 13, "text-anchor": "middle" }, isFinite ? number(score, 4) : "−∞") : null,
        MLF.handle(drawing, `score-${i}`, {
          x: middle(i), y: end, axis: "y", room: Math.min(44, column), value: isFinite ? score : y.low, least: y.low, most: y.high, step: y.step,
          label: `score ${i + 1}`, text: isFinite ? number(score) : "masked", at: axis.from, children: [knob],
          change: (value) => act.set("scores", scores.map((each, k) => (k === i ? value : each === -Infinity ? "-inf" : each)).join(", ")),
        }));
    }

    function running() {
      const { m, end } = steps[at - 1];
      const line = left + end * column;
      const inside = line > width - 70; // its name goes above the panel then, where no score is
      return s("g", {}, s("line", { class: "mlf-running", x1: left, x2: line, y1: axis.at(m), y2: axis.at(m) }),
        s("text", { class: "mlf-label mlf-chip-name", ...(inside ? { x: width - right, y: 13, "text-anchor": "end" } : { x: line + 6, y: axis.at(m) + 4 }) }, `m = ${rough(m)}`));
    }

    function sums() {
      const [ceiling, found] = [base + gap, []];
      const name = done ? "Weights that are written" : "What each score has added to d";
      found.push(s("text", { class: "mlf-strong mlf-label", x: 0, y: ceiling - 9 }, name));
      const bars = done ? results.weights.map((held, i) => ({ held, right: results.exact[i] })) : at ? terms(values, results, at) : [];
      const most = Math.max(1e-300, ...bars.filter(Boolean).map(({ held, right }) => Math.max(held, right)));
      const scale = lower / (most > 1 || most < 0.3 ? most * 1.12 : 1.12);
      bars.forEach((bar, i) => {
        if (!bar) return;
        const isWrong = Math.abs(bar.held - bar.right) > 1e-9 * Math.max(bar.held, bar.right);
        const thick = Math.min(34, column * 0.62);
        found.push(s("rect", { class: isWrong ? "mlf-bad-bar" : done ? "mlf-hbm-bar" : "mlf-chip-bar", x: middle(i) - thick / 2, y: floor - bar.held * scale, width: thick, height: bar.held * scale },
          s("title", {}, `score ${i + 1}: ${plain(bar.held)}${isWrong ? `, right: ${plain(bar.right)}` : ""}`)));
        if (isWrong) found.push(s("line", { class: "mlf-right-mark", x1: middle(i) - thick / 2 - 3, x2: middle(i) + thick / 2 + 3, y1: floor - bar.right * scale, y2: floor - bar.right * scale }));
        if (column > 50) found.push(s("text", { class: "mlf-label", x: middle(i), y: floor - bar.held * scale - 5, "text-anchor": "middle" }, number(bar.held, 3)));
      });
      found.push(s("line", { class: "mlf-axis", x1: left, x2: width - right, y1: floor, y2: floor }));
      if (at && !done) found.push(s("text", { class: "mlf-label mlf-chip-name", x: left, y: floor + 17 }, `together d = ${plain(steps[at - 1].d)}`));
      return found;
    }
  }

  function build(host, act) {
    const caption = h("figcaption", {}, "");
    const figure = h("figure", {}, caption);
    const list = h("dl", { class: "mlf-facts simple" });
    const legend = h("p", { class: "mlf-legend" }, [["hbm", "read or written"], ["chip", "on the chip"], ["bad", "wrong; the line is the right value"]].map(([kind, text]) =>
      h("span", {}, h("span", { class: `mlf-swatch mlf-${kind}-swatch` }), text)));
    figure.append(legend);
    const drawing = new MLF.Drawing(figure, paint);
    host.append(figure, act.player, list);
    return (values, results, step) => {
      caption.textContent = values.rescale ? "One factor per tile corrects all that was added before" : "Without the factor, old terms keep an old reference";
      drawing.update({ values, results, step, act });
      const state = step ? results.steps[Math.min(step, results.steps.length) - 1] : { m: -Infinity, d: 0, factor: null, right: 0 };
      list.replaceChildren(...MLF.facts([
        ["Maximum m", plain(state.m), "of the scores read so far"],
        ["Factor", state.factor === null || state.before === -Infinity ? "–" : plain(state.factor), "e^(old m − new m), of this tile"],
        ["Sum d", plain(state.d), values.rescale || state.d === state.right ? "relative to m" : `should be ${plain(state.right)}`],
        ["Passes over the row", "2", "one for m and d, one for the weights; three without the recurrence"],
      ]));
      return words(values, results, step);
    };
  }

  MLF.start({ name: "online_softmax", title: "Online-softmax bench", groups, compute, build, begin: 1, steps: (_, { steps }) => steps.length + 1 });
})(globalThis);
