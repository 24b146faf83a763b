/* The roofline explorer: an operator's two numbers, a device's two numbers, and what follows. */
(function (root) {
  "use strict";

  const { MLF, MLF_DATA: data } = root;
  const { h } = MLF;
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

  const groups = [
    {
      legend: "Device",
      fields: [
        { id: "gpu", label: "Device", kind: "choice", options: deviceOptions, initial: "H100" },
        { id: "rate", label: "Arithmetic in", kind: "choice", initial: SAME,
          options: [{ value: SAME, text: "as stored" }, ...rates.map((value) => ({ value, text: value }))] },
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
      ],
    },
  ];

  function compute(values) {
    const device = data.devices[values.gpu];
    const rate = values.rate === SAME ? values.dtype : values.rate;
    const sizes = Object.fromEntries(data.operators[values.op].sizes.map((size) => [size.argument || size.id, values[size.id]]));
    const cost = operatorCost(data, values.op, sizes, values.dtype);
    try {
      peak(device, rate, values.rate === SAME ? "dtype" : "rate");
    } catch (error) {
      error.message += values.rate === SAME ? ". Choose another format, or the rate that its arithmetic runs at" : "";
      throw error;
    }
    const found = { device, rate, sizes, cost, ...roofline(cost, device, rate) };
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

  function picture(found, name) {
    const { device, rate, intensity } = found;
    const beta = device.memoryBandwidth;
    const tops = ceilings(device);
    const chosen = device.peakFlops[rate];
    const inside = intensity > 0 ? intensity : found.ridge;
    const low = 10 ** Math.floor(Math.log10(Math.min(0.2, inside / 3)));
    const high = 10 ** Math.ceil(Math.log10(Math.max((tops[0][0] / beta) * 8, inside * 40)));
    const bottom = Math.min(low * beta, tops.at(-1)[0] / 4);
    const lines = tops.map(([top, names]) => ({
      points: [[Math.max(top / beta, low), top], [high, top]],
      className: top === chosen ? "mlf-arith" : "mlf-arith mlf-other",
      label: { text: `${names.join(", ")}: ${quantity(top, "FLOP/s", 4)}`, short: names.join(", "), x: high, y: top, className: top === chosen ? "mlf-strong" : "" },
    }));
    lines.push({
      points: [[low, low * beta], [tops[0][0] / beta, tops[0][0]]], className: "mlf-hbm mlf-other" });
    lines.push({
      points: [[low, low * beta], [chosen / beta, chosen]], className: "mlf-hbm",
      label: { text: `memory: ${quantity(beta, "B/s", 4)}`, short: quantity(beta, "B/s", 4), x: 8 * low, y: 8 * low * beta, anchor: "start", dx: 12, dy: 14, className: "mlf-strong" } });
    return {
      height: 360,
      label: `Roofline of ${device.name}: rate over intensity, both axes logarithmic. The memory roof rises with ${quantity(beta, "B/s", 4)} and meets the ${rate} peak of ${quantity(chosen, "FLOP/s", 4)} at ${number(found.ridge, 4)} FLOP/B. ` +
        (intensity > 0 ? `${name} lies at ${number(intensity, 4)} FLOP/B and may reach ${quantity(found.attainable, "FLOP/s", 4)}.` : `${name} does no arithmetic and has no point.`),
      x: { low, high, log: true, name: "arithmetic intensity, FLOP/B" },
      y: { low: bottom, high: tops[0][0] * 2.2, log: true, unit: "FLOP/s", name: "FLOP/s" },
      lines,
      marks: [{ x: found.ridge, className: "mlf-thin", label: `ridge ${number(found.ridge, 4)}`, low: true }],
      points: intensity > 0 ? [{ x: intensity, y: found.attainable, className: found.boundBy === "compute" ? "mlf-arith" : "mlf-hbm", label: name }] : [],
    };
  }

  function build(host) {
    const line = h("p", { class: "mlf-verdict", role: "status" });
    const list = h("dl", { class: "mlf-facts simple" });
    const caption = h("figcaption", {}, "");
    const figure = h("figure", {}, caption);
    const used = h("div", {});
    host.append(figure, line, list, used);
    const plot = new MLF.Plot(figure);
    const probe = new MLF.Probe(figure, [plot], "Read the roof at an intensity", "mlf-roofline-probe");
    return (values, found) => {
      const name = data.operators[values.op].name;
      const [strong, rest] = verdict(found, name);
      line.replaceChildren(h("strong", {}, strong), rest);
      list.replaceChildren(...MLF.facts(figures(found)));
      caption.textContent = `The roof of ${found.device.name}, and where ${name} stands under it`;
      const view = picture(found, name);
      plot.update(view);
      probe.update(view.x, (x) => {
        const y = MLF.formulas.attainable(x, found.device, found.rate);
        const limit = x > found.ridge ? "arithmetic limits" : "memory limits";
        return { x, ys: [[y]], text: `${number(x, 3)} FLOP/B: at most ${quantity(y, "FLOP/s", 3)} in ${found.rate}; ${limit}.` };
      }, Math.max(found.intensity, view.x.low));
      const { device, rate } = found;
      used.replaceChildren(MLF.sources([
        [`${device.fullName}, ${rate} peak, dense`, quantity(peak(device, rate), "FLOP/s"), device.sources.peakFlops],
        [`${device.fullName}, memory bandwidth`, quantity(device.memoryBandwidth, "B/s"), device.sources.memoryBandwidth],
        [`Operations and bytes of ${name}`, data.operators[values.op].counts, "utils/operators.py in the course’s repository"],
      ]));
    };
  }

  MLF.start({ name: "roofline", title: "Roofline explorer", groups, compute, build });
})(globalThis);
