/* The roofline: an operator's two numbers, a device's two numbers, and what follows; both can be dragged, and recorded kernels
   stand below as dots. */
(function (root) {
  "use strict";

  const { MLF, MLF_DATA: data } = root;
  const { h, s } = MLF;
  const { operatorCost, roofline, crossoverBatch, peak } = MLF.formulas;
  const { number, quantity } = MLF.units;

  const entries = Object.entries;
  const SAME = "same";

  const deviceOptions = entries(data.devices).map(([value, device]) => ({ value, text: device.label, group: device.group }));
  const formats = Object.keys(data.elementSize);
  const rates = [...new Set(Object.values(data.devices).flatMap((device) => Object.keys(device.peakFlops)))];

  /** One field for each size that some operator has; it is there when the chosen operator has it. */
  function sizeFields() {
    const fields = new Map();
    for (const [name, operator] of entries(data.operators)) {
      for (const size of operator.sizes) {
        const field = fields.get(size.id) || { ...size, kind: size.flag ? "flag" : "whole", of: [] };
        field.of.push(name);
        fields.set(size.id, field);
      }
    }
    return [...fields.values()].map((field) => ({ ...field, when: (text) => field.of.includes(text.op) }));
  }

  const [NONE, ALL] = ["none", "all"];

  /** Along which sizes the point of an operator can be dragged: the other operators' intensity is the same at every size. */
  const DRAGS = {
    matmul: [{ id: "m", text: "its rows m", sizes: ["m"] }, { id: "side", text: "m = k = n", sizes: ["m", "k", "n"] }],
    attention: [{ id: "tokens", text: "its queries and keys", sizes: ["seq_len", "kv_len"] }, { id: "head_dim", text: "its head dimension D", sizes: ["head_dim"] }],
    elementwise: [{ id: "flops_per_element", text: "its FLOPs an element", sizes: ["flops_per_element"] }],
  };
  /** Sizes that a point is dragged over: four to each power of two. */
  const SIZES = [...new Set(Array.from({ length: 69 }, (_, i) => Math.round(2 ** (i / 4))))];
  /** Factors that a roof is dragged over. */
  const TIMES = Array.from({ length: 65 }, (_, i) => Number((2 ** ((i - 32) / 8)).toPrecision(3)));

  const groups = [
    {
      legend: "Device",
      fields: [
        { id: "gpu", label: "Device", kind: "choice", options: deviceOptions, initial: "H100" },
        { id: "rate", label: "Arithmetic in", kind: "choice", initial: SAME,
          options: [{ value: SAME, text: "as stored" }, ...rates.map((value) => ({ value, text: value }))] },
        { id: "peak", label: "Peak rate", unit: "× data sheet", kind: "number", initial: "1", least: 0.01, most: 100 },
        { id: "beta", label: "Bandwidth", unit: "× data sheet", kind: "number", initial: "1", least: 0.01, most: 100 },
      ],
    },
    {
      legend: "Operator",
      fields: [
        { id: "op", label: "Operator", kind: "choice", wide: true, initial: "matmul",
          options: entries(data.operators).map(([value, operator]) => ({ value, text: operator.label })) },
        { id: "dtype", label: "Elements stored as", kind: "choice", initial: "bf16",
          options: formats.map((value) => ({ value, text: `${value}, ${data.elementSize[value]} B` })) },
        ...sizeFields(),
        ...entries(DRAGS).map(([op, drags]) => ({ id: `drag_${op}`, label: "The point is dragged along", kind: "choice", wide: true, initial: drags[0].id,
          options: drags.map(({ id, text }) => ({ value: id, text })), when: (text) => text.op === op })),
      ],
    },
    {
      legend: "Recorded kernels",
      fields: [
        { id: "kernels", label: "Dots", kind: "choice", wide: true, initial: "operators",
          options: [{ value: NONE, text: "none" }, ...entries(data.kernels).map(([value, group]) => ({ value, text: group.label })), { value: ALL, text: "all of them" }] },
      ],
    },
  ];

  /** A change of the device takes the data sheet's roofs. */
  const changed = (id) => (id === "gpu" ? { peak: "1", beta: "1" } : {});

  /** The device with its roofs as they were dragged, in whole FLOP/s and B/s. */
  function dragged(device, values) {
    const scaled = (rate, times) => Math.round(rate * times);
    return { ...device, memoryBandwidth: scaled(device.memoryBandwidth, values.beta),
      peakFlops: Object.fromEntries(entries(device.peakFlops).map(([name, rate]) => [name, scaled(rate, values.peak)])) };
  }

  function compute(values) {
    const sheet = data.devices[values.gpu];
    const device = dragged(sheet, values);
    const rate = values.rate === SAME ? values.dtype : values.rate;
    const sizes = Object.fromEntries(data.operators[values.op].sizes.map((size) => [size.argument || size.id, values[size.id]]));
    const cost = operatorCost(data, values.op, sizes, values.dtype);
    try {
      peak(device, rate, values.rate === SAME ? "dtype" : "rate");
    } catch (error) {
      error.message += values.rate === SAME ? ". Choose another format, or the rate that its arithmetic runs at" : "";
      throw error;
    }
    const found = { device, sheet, rate, sizes, cost, ...roofline(cost, device, rate) };
    if (values.op === "matmul" && rate === values.dtype) {
      found.crossover = crossoverBatch(data, sizes.k, sizes.n, device, rate);
    }
    return found;
  }

  /* ---- what is shown ---- */

  function verdict(found, name) {
    const { device, boundBy, intensity, ridge } = found;
    const least = quantity(found.overlapped, "s", 4);
    if (found.cost.flops === 0n) return [`Memory-bound: ${name} does no arithmetic.`, ` At least ${least} on one ${device.name}.`];
    const times = boundBy === "compute" ? intensity / ridge : ridge / intensity;
    const which = boundBy === "compute" ? "above" : "below";
    const side = times < 1.0005 ? "at the ridge" : `${number(times, 3)} times ${which} the ridge`;
    return [`${boundBy === "compute" ? "Compute" : "Memory"}-bound, ${side}.`, ` At least ${least} on one ${device.name}.`];
  }

  function figures(found) {
    const { cost } = found;
    const rows = [
      ["Arithmetic", quantity(Number(cost.flops), "FLOP", 4), `${number(cost.flops)} FLOP`],
      ["Least traffic", quantity(Number(cost.bytes), "B", 4), `${number(cost.bytes)} B`],
      ["Intensity", `${number(found.intensity, 4)} FLOP/B`, "arithmetic over traffic"],
      ["Ridge point", `${number(found.ridge, 4)} FLOP/B`, `${found.rate} peak over bandwidth`],
      ["Attainable rate", quantity(found.attainable, "FLOP/s", 4), `${number((100 * found.attainable) / peak(found.device, found.rate), 3)} % of the peak`],
      ["Time to compute", quantity(found.computeTime, "s", 4), "at the peak rate"],
      ["Time to move", quantity(found.memoryTime, "s", 4), "at the full bandwidth"],
      ["Time, between", `${quantity(found.overlapped, "s", 4)} – ${quantity(found.serial, "s", 4)}`, "all overlaps – nothing does"],
    ];
    if (found.crossover === undefined) return rows;
    const { k, n } = found.sizes;
    const text = found.crossover === null ? "no number of rows" : `${number(found.crossover)} rows`;
    return [...rows, ["Compute-bound from", text, `of (rows, ${number(k)}) × (${number(k)}, ${number(n)})`]];
  }

  /** Names of the formats that share a peak, highest first: [[rate, names]]. */
  function ceilings(device) {
    const shared = new Map();
    for (const [name, rate] of entries(device.peakFlops)) shared.set(rate, [...(shared.get(rate) || []), name]);
    return [...shared].sort((a, b) => b[0] - a[0]);
  }

  /* ---- the picture: its axes stay where they are while something is dragged ---- */

  /** The axes: those of the data sheet's roofs, wider by whole decades where something lies outside. */
  function frame(found) {
    const { device, sheet, intensity } = found;
    const beta = sheet.memoryBandwidth;
    const top = Math.max(...Object.values(sheet.peakFlops));
    const decade = (value, up) => 10 ** (up ? Math.ceil(Math.log10(value) - 1e-9) : Math.floor(Math.log10(value) + 1e-9));
    const inside = intensity > 0 ? intensity : found.ridge;
    const low = Math.min(0.1, decade(inside / 1.5, false));
    const high = Math.max(1e4, decade(inside * 1.5, true));
    const least = Math.min(low * beta, low * device.memoryBandwidth, ...Object.values(device.peakFlops).map((rate) => rate / 3));
    const most = Math.max(3 * top, 1.6 * Math.max(...Object.values(device.peakFlops)));
    return { low, high, bottom: decade(least, false), top: most > 3 * top ? decade(most, true) : most };
  }

  function roofs(found, box) {
    const { device, rate } = found;
    const beta = device.memoryBandwidth;
    const chosen = device.peakFlops[rate];
    const tops = ceilings(device);
    const lines = tops.map(([top, names]) => ({
      points: [[Math.max(top / beta, box.low), top], [box.high, top]],
      className: top === chosen ? "mlf-arith" : "mlf-arith mlf-other",
      title: `${names.join(", ")}: ${quantity(top, "FLOP/s", 4)}`,
    }));
    lines.push({ points: [[box.low, box.low * beta], [tops[0][0] / beta, tops[0][0]]], className: "mlf-hbm mlf-other" });
    lines.push({ points: [[box.low, box.low * beta], [chosen / beta, chosen]], className: "mlf-hbm" });
    return lines;
  }

  function picture(found, name, over) {
    const { device, rate, intensity } = found;
    const beta = device.memoryBandwidth;
    const box = frame(found);
    return {
      height: 400,
      margin: 18 + Math.max(...ceilings(device).map(([, names]) => 6.8 * names.join(", ").length)),
      label: `Roofline of ${device.name}: rate over intensity, both axes logarithmic. The memory roof rises with ${quantity(beta, "B/s", 4)} and meets the ${rate} peak of ${quantity(device.peakFlops[rate], "FLOP/s", 4)} at ${number(found.ridge, 4)} FLOP/B. ` +
        (intensity > 0 ? `${name} lies at ${number(intensity, 4)} FLOP/B and may reach ${quantity(found.attainable, "FLOP/s", 4)}.` : `${name} does no arithmetic and has no point.`),
      x: { low: box.low, high: box.high, log: true, name: "arithmetic intensity, FLOP/B" },
      y: { low: box.bottom, high: box.top, log: true, unit: "FLOP/s", name: "FLOP/s" },
      lines: roofs(found, box),
      marks: [{ x: found.ridge, className: "mlf-thin", label: `ridge ${number(found.ridge, 4)}`, low: true }],
      over,
    };
  }

  /* ---- what can be dragged ---- */

  const times = (value) => (value === 1 ? "as on the data sheet" : `${number(value, 3)} times the data sheet’s`);

  /** Names of the flat roofs, as far apart as letters need: to the right of the axes where there is room, else above the lines. */
  function roofNames(plot, found) {
    if (plot.narrow) return [];
    const chosen = found.device.peakFlops[found.rate];
    const tops = ceilings(found.device).map(([top, names]) => ({ names: names.join(", "), top, y: plot.y.at(top) + (plot.roomy ? 4 : top < chosen ? 13 : -4) }));
    tops.forEach((each, i) => {
      if (i) each.y = Math.max(each.y, tops[i - 1].y + 15);
    });
    const place = plot.roomy ? { x: plot.box.right + 10 } : { x: plot.box.right - 2, "text-anchor": "end" };
    return tops.filter(({ y, top }) => y < plot.box.bottom && (plot.roomy || top !== chosen)).map(({ names, top, y }) =>
      s("text", { class: top === chosen ? "mlf-label mlf-strong" : "mlf-roof-name", ...place, y }, names));
  }

  /** Two arrowheads beside a handle of a roof. */
  function grip(x, y, className) {
    return [s("circle", { class: `mlf-knob ${className}`, cx: x, cy: y, r: 9 }),
      s("path", { class: "mlf-updown", d: `M${x - 3.5} ${y - 1.5}L${x} ${y - 5}L${x + 3.5} ${y - 1.5}M${x - 3.5} ${y + 1.5}L${x} ${y + 5}L${x + 3.5} ${y + 1.5}` })];
  }

  /** Handles of the two roofs: the flat one by its height, the slope by its height at an intensity that stays. */
  function roofHandles(plot, values, found, act) {
    const { device, sheet, rate } = found;
    const { low, high } = plot.view.x;
    const inside = (y) => Math.max(plot.box.top + 8, Math.min(plot.box.bottom - 8, y));
    const [slopeX, flatX] = [low * (high / low) ** 0.2, low * (high / low) ** 0.93];
    const [peak, beta] = [sheet.peakFlops[rate], sheet.memoryBandwidth];
    const flat = { x: Math.min(plot.box.right - 10, plot.x.at(flatX)), y: inside(plot.y.at(device.peakFlops[rate])) };
    const slope = { x: plot.x.at(slopeX), y: inside(plot.y.at(slopeX * device.memoryBandwidth)) };
    const named = (x, y, anchor, words) => s("text", { class: "mlf-label mlf-strong", x, y, "text-anchor": anchor }, words);
    const top = `${plot.roomy ? "" : `${rate}: `}${quantity(device.peakFlops[rate], "FLOP/s", 4)}`;
    return [...roofNames(plot, found), named(slope.x + 15, slope.y + 18, "start", `memory: ${quantity(device.memoryBandwidth, "B/s", 4)}`), named(plot.roomy ? plot.box.right - 2 : flat.x - 14, flat.y - (plot.roomy ? 13 : 6), "end", top),
      MLF.handle(plot, "peak", { ...flat, axis: "y", value: values.peak, values: TIMES, label: `${rate} peak`, room: 44, children: grip(flat.x, flat.y, "mlf-arith-knob"),
        text: `${quantity(device.peakFlops[rate], "FLOP/s", 4)}, ${times(values.peak)}`, at: (pixel) => plot.y.from(pixel) / peak, change: (value) => act.set("peak", value) }),
      MLF.handle(plot, "beta", { ...slope, axis: "y", value: values.beta, values: TIMES, label: "memory bandwidth", room: 44, children: grip(slope.x, slope.y, "mlf-hbm-knob"),
        text: `${quantity(device.memoryBandwidth, "B/s", 4)}, ${times(values.beta)}`, at: (pixel) => plot.y.from(pixel) / slopeX / beta, change: (value) => act.set("beta", value) })];
  }

  /** The operator's point: a handle where its intensity depends on the size that is dragged, else a plain point. */
  function pointHandle(plot, values, found, name, act) {
    if (!(found.intensity > 0)) return [];
    const [x, y] = [plot.x.at(found.intensity), plot.y.at(found.attainable)];
    const end = Math.max(x - 14, plot.box.left + 7 * name.length + 4);
    const roof = (pixel) => plot.y.at(Math.min(found.device.peakFlops[found.rate], plot.x.from(pixel) * found.device.memoryBandwidth));
    const above = Math.min(y, roof(end)) - 14;
    const flat = plot.y.at(found.device.peakFlops[found.rate]); // whose rate stands above it
    const label = s("text", { class: "mlf-label mlf-strong", x: end, y: above < flat + 12 ? flat - 31 : above, "text-anchor": "end" }, name);
    const drag = (DRAGS[values.op] || []).find(({ id }) => id === values[`drag_${values.op}`]);
    const dot = s("circle", { class: "mlf-point", cx: x, cy: y, r: 8 });
    if (!drag) return [dot, label];
    const size = Number(values[drag.sizes[0]]);
    const intensityOf = (each) => {
      const cost = operatorCost(data, values.op, { ...found.sizes, ...Object.fromEntries(drag.sizes.map((id) => [id, each])) }, values.dtype);
      return Number(cost.flops) / Number(cost.bytes);
    };
    const places = SIZES.map((each) => Math.log(intensityOf(each)));
    const at = (pixel) => {
      const wanted = Math.log(plot.x.from(pixel));
      let best = 0;
      places.forEach((place, i) => {
        if (Math.abs(place - wanted) < Math.abs(places[best] - wanted) - 1e-9) best = i;
      });
      return SIZES[best];
    };
    return [label, MLF.handle(plot, "point", { x, y, axis: "x", value: size, values: SIZES, label: `${name}: ${drag.text}`, children: [dot],
      text: `${number(size, 6)}; ${number(found.intensity, 4)} FLOP/B, at most ${quantity(found.attainable, "FLOP/s", 4)}`, at,
      change: (each) => act.set(Object.fromEntries(drag.sizes.map((id) => [id, each]))) })];
  }

  /* ---- recorded kernels ---- */

  function kernelsOf(values) {
    const groups = values.kernels === ALL ? Object.values(data.kernels) : values.kernels === NONE ? [] : [data.kernels[values.kernels]];
    return groups.flatMap((group) => group.points).filter((point) => point.gpu === values.gpu).sort((a, b) => a.intensity - b.intensity || a.flopsPerSecond - b.flopsPerSecond);
  }

  /** What a dot says: name, sizes, rate, share of its own roof on the data sheet, device, date. */
  function described(point, sheet) {
    const roof = MLF.formulas.attainable(point.intensity, sheet, point.unit);
    return `${point.name} (${point.size}): ${number(point.intensity, 3)} FLOP/B, ${quantity(point.flopsPerSecond, "FLOP/s", 3)} in ${quantity(point.seconds, "s", 3)}, ` +
      `${number((100 * point.flopsPerSecond) / roof, 3)} % of its ${point.unit} roof. ${point.device}, ${point.date}.`;
  }

  class Dots {
    /** Dots of recorded kernels: one tab stop, arrow keys go from one to the next, Enter puts the operator there. */
    constructor(output, act) {
      [this.output, this.act, this.chosen, this.points] = [output, act, 0, []];
    }

    draw(plot, points, sheet) {
      if (points !== this.points) [this.points, this.chosen] = [points, Math.min(this.chosen, Math.max(0, points.length - 1))];
      [this.plot, this.sheet] = [plot, sheet];
      this.mark = s("g", { class: "mlf-dot-mark" });
      const inside = ({ x, y }) => x >= plot.box.left && x <= plot.box.right && y >= plot.box.top && y <= plot.box.bottom;
      this.elements = points.map((point, i) => {
        const place = { x: plot.x.at(point.intensity), y: plot.y.at(point.flopsPerSecond) };
        return s("circle", { class: "mlf-dot", cx: place.x, cy: place.y, r: 4.5, role: "option", "aria-selected": false, tabindex: i === this.chosen ? 0 : -1,
          "aria-label": described(point, sheet), "data-handle": `dot-${i}`, visibility: inside(place) ? null : "hidden",
          onpointerenter: () => this.choose(i), onfocus: () => this.choose(i), onclick: () => this.place(point), onkeydown: (event) => this.key(event, i) });
      });
      if (!points.length) return [];
      return [this.mark, s("g", { role: "listbox", "aria-label": "recorded kernels" }, this.elements)];
    }

    key(event, i) {
      const to = { ArrowRight: i + 1, ArrowUp: i + 1, ArrowLeft: i - 1, ArrowDown: i - 1, Home: 0, End: this.points.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") this.place(this.points[i]);
      else if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      else this.elements[Math.max(0, Math.min(this.points.length - 1, to))].focus({ preventScroll: true });
      event.preventDefault();
    }

    /** The operator itself goes to where the kernel was measured, if it is one of the figure's operators. */
    place(point) {
      if (point.set) this.act.set(point.set);
    }

    choose(i) {
      const point = this.points[i];
      this.elements.forEach((element, k) => {
        element.setAttribute("tabindex", k === i ? 0 : -1);
        element.setAttribute("aria-selected", k === i);
        element.classList.toggle("mlf-dot-chosen", k === i);
      });
      this.chosen = i;
      const roof = MLF.formulas.attainable(point.intensity, this.sheet, point.unit);
      const [x, y, top] = [this.plot.x.at(point.intensity), this.plot.y.at(point.flopsPerSecond), this.plot.y.at(roof)];
      const right = x > (this.plot.box.left + this.plot.box.right) / 2;
      this.mark.replaceChildren(s("line", { x1: x, x2: x, y1: y, y2: Math.max(this.plot.box.top, top) }),
        s("text", { class: "mlf-label mlf-strong", x: x + (right ? -9 : 9), y: y + 16, "text-anchor": right ? "end" : "start" }, point.name));
      this.output.textContent = described(point, this.sheet) + (point.set ? " A click or Enter puts the operator there." : "");
    }
  }

  const HINT = "Drag the point along its sizes, and the two roofs up and down. ";

  function build(host, act) {
    const line = h("p", { class: "mlf-verdict", role: "status" });
    const list = h("dl", { class: "mlf-facts simple" });
    const caption = h("figcaption", {}, "");
    const said = h("p", { class: "mlf-dots-said", "aria-live": "off" });
    const figure = h("figure", {}, caption);
    const used = h("div", {});
    host.append(figure, line, list, used);
    const plot = new MLF.Plot(figure);
    figure.append(said);
    const probe = new MLF.Probe(figure, [plot], "Read the roof at an intensity", `mlf-${act.key}-probe`);
    const dots = new Dots(said, act);
    return (values, found) => {
      const name = data.operators[values.op].name;
      const [strong, rest] = verdict(found, name);
      const { device, sheet, rate } = found;
      line.replaceChildren(h("strong", {}, strong), rest);
      list.replaceChildren(...MLF.facts(figures(found)));
      const own = [values.peak !== 1 && `peak × ${number(values.peak, 3)}`, values.beta !== 1 && `bandwidth × ${number(values.beta, 3)}`].filter(Boolean).join(", ");
      caption.textContent = `The roof of ${device.name}${own ? ` with ${own}` : ""}, and where ${name} stands under it`;
      const points = kernelsOf(values);
      const recorded = [...new Set(Object.values(data.kernels).flatMap((group) => group.points.map(({ gpu }) => gpu)))].join(", ");
      said.textContent = (DRAGS[values.op] ? HINT : "Drag the two roofs up and down; the intensity of this operator is the same at every size. ") +
        (points.length ? "Each dot is a recorded kernel: point at it, or go from one to the next with the arrow keys." : values.kernels === NONE ? "" : `The recorded kernels ran on ${recorded}: choose it to see them.`);
      const view = picture(found, name, (drawn) => [...dots.draw(drawn, points, sheet), ...roofHandles(drawn, values, found, act), ...pointHandle(drawn, values, found, name, act)]);
      plot.update(view);
      probe.update(view.x, (x) => {
        const y = MLF.formulas.attainable(x, device, rate);
        const limit = x > found.ridge ? "arithmetic limits" : "memory limits";
        return { x, ys: [[y]], text: `${number(x, 3)} FLOP/B: at most ${quantity(y, "FLOP/s", 3)} in ${rate}; ${limit}.` };
      }, Math.max(found.intensity, view.x.low));
      used.replaceChildren(MLF.sources([
        [`${device.fullName}, ${rate} peak, dense`, quantity(peak(sheet, rate), "FLOP/s"), device.sources.peakFlops],
        [`${device.fullName}, memory bandwidth`, quantity(sheet.memoryBandwidth, "B/s"), device.sources.memoryBandwidth],
        [`Operations and bytes of ${name}`, data.operators[values.op].counts, "utils/operators.py in the course’s repository"],
        ...(points.length ? [["Recorded kernels", `${points.length} of ${[...new Set(points.map(({ date }) => date))].join(", ")}`, `utils/records: ${[...new Set(points.map(({ record }) => record))].join(", ")}`]] : []),
      ]));
    };
  }

  MLF.start({ name: "roofline", title: "Roofline", groups, compute, build, changed });
})(globalThis);
