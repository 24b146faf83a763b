/* The tile and traffic sandbox: drag the tile of a matrix product or of FlashAttention, and see the bytes that it asks of memory,
   what it holds on the chip, and where that puts it under the roofline. */
(function (root) {
  "use strict";

  const { MLF, MLF_DATA: data } = root;
  const { h, s } = MLF;
  const { number, quantity } = MLF.units;
  const { peak, attainable } = MLF.formulas;

  const TILES = [16, 32, 64, 128, 256];
  const HEAD_DIMS = [16, 32, 64, 128, 256];
  const STATISTIC = 4; // bytes of a row's logsumexp, maximum or sum, in fp32
  const isAttention = (text) => text.kernel === "attention";
  const isProduct = (text) => text.kernel === "matmul";

  const choices = (values) => values.map((value) => ({ value: String(value), text: String(value) }));
  const length = (id, label, initial, when) => ({ id, label, kind: "whole", initial, least: 1, most: 65536, when });
  const groups = [
    {
      legend: "Kernel",
      fields: [
        { id: "kernel", label: "Kernel", kind: "choice", initial: "attention", options: [
          { value: "attention", text: "FlashAttention, forward" }, { value: "matmul", text: "matrix product" }] },
        { id: "block_m", label: "BLOCK_M", kind: "choice", initial: "64", options: choices(TILES) },
        { id: "block_n", label: "BLOCK_N", kind: "choice", initial: "64", options: choices(TILES) },
        { id: "head_dim", label: "Head dimension D", kind: "choice", initial: "64", options: choices(HEAD_DIMS), when: isAttention },
        { id: "block_k", label: "BLOCK_K", kind: "choice", initial: "32", options: choices(TILES), when: isProduct },
        { id: "causal", label: "causal", kind: "flag", initial: "0", when: isAttention },
      ],
    },
    {
      legend: "Size",
      fields: [
        length("queries", "Queries", "1024", isAttention), length("keys", "Keys", "1024", isAttention),
        { id: "heads", label: "Heads, all sequences", kind: "whole", initial: "32", least: 1, most: 65536, when: isAttention },
        length("m", "Rows m", "4096", isProduct), length("k", "Inner k", "4096", isProduct), length("n", "Columns n", "4096", isProduct),
      ],
    },
    {
      legend: "Machine",
      fields: [
        { id: "gpu", label: "GPU", kind: "choice", initial: "H100",
          options: Object.entries(data.devices).filter(([, each]) => each.kind === "GPU").map(([value, each]) => ({ value, text: each.label })) },
        { id: "dtype", label: "Elements", kind: "choice", initial: "bf16", options: ["fp32", "bf16", "fp16", "fp8"].map((value) => ({ value, text: value })) },
        { id: "stages", label: "Stages in flight", kind: "whole", initial: "2", least: 1, most: 8 },
      ],
    },
  ];

  const parts = (entries) => entries.map(([name, value]) => ({ name, value }));
  const sum = (list) => list.reduce((all, each) => all + each.value, 0);

  /** utils.attention_math.visible_pairs. */
  function visiblePairs(queries, keys) {
    const seen = queries - Math.max(0, queries - keys);
    return seen * keys - (seen * (seen - 1)) / 2;
  }

  /** utils.attention_math.flash2_traffic, attention_flops and on_chip_bytes. */
  function attention(v, e) {
    const [queries, keys, heads, d] = [v.queries, v.keys, v.heads, v.head_dim].map(Number);
    const [bm, bn, stages] = [v.block_m, v.block_n, v.stages].map(Number);
    let rows = 0;
    for (let first = 0; first < queries; first += bm) {
      const seen = v.causal ? Math.max(0, Math.min(keys, first + bm + keys - queries)) : keys;
      rows += Math.min(keys, Math.ceil(seen / bn) * bn);
    }
    const [q, kv] = [heads * queries * d * e, heads * rows * d * e];
    return {
      flops: 4 * heads * d * (v.causal ? visiblePairs(queries, keys) : queries * keys),
      traffic: parts([["Q", q], ["K", kv], ["V", kv], ["O", q], ["lse", heads * queries * STATISTIC]]),
      least: 2 * q + 2 * heads * keys * d * e + heads * queries * STATISTIC,
      shared: parts([["Q", bm * d * e], ["K", stages * bn * d * e], ["V", stages * bn * d * e]]),
      registers: parts([["S, P", bm * bn * 4], ["O", bm * d * 4], ["m, d", 2 * bm * STATISTIC]]),
      rows: queries, columns: keys,
    };
  }

  /** utils.operators.matmul and tiled_matmul_bytes. */
  function product(v, e) {
    const [m, k, n, bm, bn, bk, stages] = [v.m, v.k, v.n, v.block_m, v.block_n, v.block_k, v.stages].map(Number);
    return {
      flops: 2 * m * k * n,
      traffic: parts([["A", m * k * Math.ceil(n / bn) * e], ["B", k * n * Math.ceil(m / bm) * e], ["C", m * n * e]]),
      least: (m * k + k * n + m * n) * e,
      shared: parts([["A", stages * bm * bk * e], ["B", stages * bk * bn * e]]),
      registers: parts([["C", bm * bn * 4]]),
      rows: m, columns: n,
    };
  }

  function compute(values) {
    const device = data.devices[values.gpu];
    const top = peak(device, values.dtype, "dtype");
    const found = (isAttention(values) ? attention : product)(values, data.elementSize[values.dtype]);
    const [bytes, shared, registers] = [sum(found.traffic), sum(found.shared), sum(found.registers)];
    const intensity = found.flops / bytes;
    return {
      ...found, device, bytes, intensity, ridge: top / device.memoryBandwidth, top,
      attainable: attainable(intensity, device, values.dtype),
      programs: Math.min(Math.floor(device.sharedMemory / shared), Math.floor(device.registers / registers)),
      seconds: Math.max(found.flops / top, bytes / device.memoryBandwidth),
    };
  }

  /* ---- what is shown ---- */

  const NAMES = { attention: ["queries", "keys"], matmul: ["rows of C", "columns of C"] };
  const MOST_STRIPS = 200;

  /** The columns of the grid that tile row `first` computes: [full, end], in elements; between them tiles are masked in part. */
  function extent(values, found, first, bm) {
    if (!values.causal || !isAttention(values)) return [found.columns, found.columns];
    const bn = Number(values.block_n);
    const offset = found.columns - found.rows;
    const last = Math.min(first + bm, found.rows) + offset;
    const seen = Math.max(0, Math.min(found.columns, last));
    const full = Math.floor(Math.max(0, Math.min(found.columns, first + offset + 1)) / bn) * bn;
    return [Math.min(full, found.columns), Math.min(found.columns, Math.ceil(seen / bn) * bn)];
  }

  /* The strips that are read lie left of the grid and above it; a thicker one is a larger head dimension. */
  const [LEFT, TOP] = [66, 80];
  const STRIPS = [16, 21, 26, 31, 36];
  const GAP = 6; // pixels between two stops of a handle, at least
  const LEAST = 60; // pixels that an edge leaves its handles, however short it is

  /** Where a handle stands for each tile, in pixels along an edge: at the tile's end, beside it where stops would coincide. */
  function stops(scale, edge) {
    const places = [];
    for (const tile of TILES) places.push(Math.max(tile * scale, (places.at(-1) ?? 0) + GAP));
    return places.map((place, i) => Math.min(place, edge - GAP * (TILES.length - 1 - i)));
  }

  function paint(width, { values, found, act }, drawing) {
    const [bm, bn] = [Number(values.block_m), Number(values.block_n)];
    const [rows, columns] = NAMES[values.kernel];
    const strip = isAttention(values) ? STRIPS[HEAD_DIMS.indexOf(Number(values.head_dim))] : 22;
    const [left, top, outer, upper] = [LEFT, TOP, LEFT - strip - 6, TOP - strip - 6];
    const scale = Math.min(width - left - 12, 380) / Math.max(found.rows, found.columns);
    const [wide, high] = [found.columns * scale, found.rows * scale];
    const [broad, tall] = [Math.max(wide, LEAST), Math.max(high, LEAST)];
    const height = top + tall + (isAttention(values) ? 46 : 26);
    const sizes = isAttention(values) ? `${number(found.rows)} ${rows} × ${number(found.columns)} ${columns}` : `C: ${number(found.rows)} × ${number(found.columns)}`;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
      "aria-label": `${number(found.rows)} ${rows} by ${number(found.columns)} ${columns} in tiles of ${bm} by ${bn}.` });
    const inputs = isAttention(values) ? ["Q", "K, V"] : ["A", "B"];
    svg.append(
      s("rect", { class: "mlf-hbm-pale", x: outer, y: top, width: strip, height: high }),
      s("rect", { class: "mlf-hbm-pale", x: left, y: upper, width: wide, height: strip }),
      s("rect", { class: "mlf-tile", x: left, y: top, width: wide, height: high }));
    const strips = Math.ceil(found.rows / bm);
    const together = Math.ceil(strips / MOST_STRIPS);
    for (let k = 0; k < strips; k += together) {
      const first = k * bm;
      const [full, end] = extent(values, found, first, bm * together);
      const box = { y: top + first * scale, height: Math.min(bm * together, found.rows - first) * scale };
      svg.append(s("rect", { class: "mlf-done", x: left, width: full * scale, ...box }),
        s("rect", { class: "mlf-diagonal", x: left + full * scale, width: Math.max(0, end - full) * scale, ...box }));
    }
    if (Math.min(bm, bn) * scale > 3) svg.append(lines());
    const own = { width: Math.min(bn, found.columns) * scale, height: Math.min(bm, found.rows) * scale };
    svg.append(s("rect", { class: "mlf-hbm-bar", x: outer, y: top, width: strip, height: own.height }),
      s("rect", { class: "mlf-hbm-bar", x: left, y: upper, width: own.width, height: strip }),
      s("rect", { class: "mlf-chip-bar", x: left, y: top, ...own }));
    if (high > 60) svg.append(name(outer + strip / 2, top + high - 34, inputs[0], "middle"));
    svg.append(wide > 120 ? name(left + wide - 18, upper + strip / 2 + 4.5, inputs[1], "end") : name(left + broad + 8, upper + strip / 2 + 4.5, inputs[1], "start"));
    const [along, down, thick] = [stops(scale, broad), stops(scale, tall - 16), STRIPS.map((each) => left - 6 - each)];
    const [n, m] = [left + along[TILES.indexOf(bn)], top + down[TILES.indexOf(bm)]];
    svg.append(knob("block_n", "BLOCK_N", "x", { x: n, y: upper }, along.map((each) => left + each)),
      knob("block_m", "BLOCK_M", "y", { x: outer, y: m }, down.map((each) => top + each)),
      said("BLOCK_N", bn, { x: Math.min(n, width - 44), y: upper - 14, "text-anchor": "middle" }),
      said("BLOCK_M", bm, { transform: `translate(${outer - 13} ${m}) rotate(-90)`, "text-anchor": "middle" }));
    if (isAttention(values)) {
      svg.append(knob("head_dim", "head dimension D", "x", { x: outer, y: top + tall + 12 }, thick),
        said("D", values.head_dim, { x: outer + 13, y: top + tall + 17 }));
    }
    svg.append(s("text", { x: left, y: height - 6 }, sizes));
    return svg;

    function name(x, y, text, anchor) {
      return s("text", { class: "mlf-label mlf-strong", x, y, "text-anchor": anchor }, text);
    }

    /** The value beside its handle; the handle itself says it to those who do not see it. */
    function said(label, value, place) {
      return s("text", { class: "mlf-label", "aria-hidden": "true", ...place }, `${label} ${value}`);
    }

    /** A handle with a stop at a pixel along its axis for each of the values of `key`. */
    function knob(key, label, axis, place, pixels) {
      const options = key === "head_dim" ? HEAD_DIMS : TILES;
      const at = (pixel) => options[pixels.indexOf(pixels.reduce((best, each) => (Math.abs(each - pixel) < Math.abs(best - pixel) ? each : best)))];
      return MLF.handle(drawing, key, { ...place, axis, label, value: Number(values[key]), values: options,
        text: `${label} ${values[key]}`, at, change: (to) => act.set(key, to) });
    }

    function lines() {
      const group = s("g", { class: "mlf-lines" });
      for (let x = bn; x < found.columns; x += bn) group.append(s("line", { x1: left + x * scale, x2: left + x * scale, y1: top, y2: top + high }));
      for (let y = bm; y < found.rows; y += bm) group.append(s("line", { x1: left, x2: left + wide, y1: top + y * scale, y2: top + y * scale }));
      return group;
    }
  }

  /** One bar below the other: what is held or moved, in parts, against what there is or what is least. */
  function meters(width, { found }) {
    const [left, thick, gap, top] = [4, 20, 40, 18];
    const rows = [
      ["Asked of memory", found.traffic, found.least, "each tensor once", "hbm"],
      ["Shared memory of a program", found.shared, found.device.sharedMemory, "all there is", "chip"],
      ["Registers of a program", found.registers, found.device.registers, "all of an SM", "chip"],
    ];
    const height = top + rows.length * (thick + gap) - 14;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": rows.map(([name, list, limit, what]) =>
      `${name}: ${quantity(sum(list), "B", 4)}; ${what}: ${quantity(limit, "B", 4)}`).join(". ") });
    rows.forEach(([name, list, limit, what, kind], i) => {
      const [y, all] = [top + i * (thick + gap), sum(list)];
      const most = Math.max(all, limit) * 1.02;
      const x = (value) => left + (value / most) * (width - 2 * left);
      svg.append(s("text", { class: "mlf-label mlf-strong", x: left, y: y - 5 }, name),
        s("text", { class: `mlf-label ${kind === "chip" && all > limit ? "mlf-over" : ""}`, x: width - left, y: y - 5, "text-anchor": "end" }, quantity(all, "B", 4)));
      let [from, place] = [0, 0];
      for (const part of list) {
        const [a, b] = [x(from), x(from + part.value)];
        from += part.value;
        svg.append(s("rect", { class: `mlf-part mlf-${kind}-bar`, x: a, y, width: Math.max(0, b - a), height: thick }, s("title", {}, `${part.name}: ${quantity(part.value, "B", 4)}`)));
        if (b - a > 8 * part.name.length + 8) svg.append(s("text", { class: "mlf-inside", x: (a + b) / 2, y: y + 14.5, "text-anchor": "middle" }, part.name));
        place += 1;
      }
      const end = x(limit);
      svg.append(s("line", { class: "mlf-limit", x1: end, x2: end, y1: y - 3, y2: y + thick + 4 }),
        s("text", { x: Math.min(Math.max(end, 70), width - left), y: y + thick + 15, "text-anchor": end > width / 2 ? "end" : end < 90 ? "start" : "middle" }, `${what}: ${quantity(limit, "B", 4)}`));
    });
    return svg;
  }

  function roof(found, values) {
    const { device, intensity, top, ridge } = found;
    const beta = device.memoryBandwidth;
    const [low, high] = [Math.min(1, 10 ** Math.floor(Math.log10(intensity))), Math.max(1e4, 10 ** Math.ceil(Math.log10(intensity)))];
    const isBound = intensity >= ridge;
    return {
      height: 250,
      label: `Roofline of ${device.name}: the kernel's ${number(intensity, 4)} FLOP/B allow ${quantity(found.attainable, "FLOP/s", 4)} of ${quantity(top, "FLOP/s", 4)}.`,
      x: { low, high, log: true, name: "FLOP per byte asked of memory" },
      y: { low: (low * beta) / 4, high: top * 2.5, log: true, unit: "FLOP/s", name: "FLOP/s" },
      lines: [
        { points: [[ridge, top], [high, top]], className: "mlf-arith", label: { text: `${values.dtype}: ${quantity(top, "FLOP/s", 3)}`, short: quantity(top, "FLOP/s", 3), x: high, y: top } },
        { points: [[low, low * beta], [ridge, top]], className: "mlf-hbm" },
      ],
      marks: [{ x: ridge, className: "mlf-thin", label: `ridge ${number(ridge, 3)}`, low: true }],
      points: [{ x: intensity, y: found.attainable, className: isBound ? "mlf-arith" : "mlf-hbm", label: `${number(intensity, 3)} FLOP/B`, below: true }],
    };
  }

  function verdict(found) {
    const times = found.bytes / found.least;
    const more = times < 1.005 ? "each tensor is asked for about once" : `${number(times, 3)} times the bytes of each tensor`;
    if (!found.programs) return ["Does not fit", `: a program of this tile needs more than an SM of ${found.device.name} has.`];
    const side = found.intensity >= found.ridge ? "Arithmetic limits, even if every byte came from HBM" : "Memory would limit, if every byte came from HBM";
    return [side, `: ${more}, ${number(found.intensity, 3)} FLOP/B against a ridge of ${number(found.ridge, 3)}.`];
  }

  const LEGEND = [["hbm", "read for the first tile"], ["chip", "that tile, on the chip"], ["done", "the other tiles"], ["diagonal", "masked in part"]];

  function build(host, act) {
    const caption = h("figcaption", {}, "Drag the round handles: larger tiles ask for fewer bytes and hold more on the chip");
    const legend = h("p", { class: "mlf-legend" });
    const grid = h("div", {});
    const side = h("div", {});
    const line = h("p", { class: "mlf-verdict", role: "status" });
    const list = h("dl", { class: "mlf-facts simple" });
    host.append(h("figure", {}, caption, legend, h("div", { class: "mlf-pair" }, grid, side)), line, list);
    const drawing = new MLF.Drawing(grid, paint);
    const bars = new MLF.Drawing(side, meters);
    const plot = new MLF.Plot(side);
    return (values, found) => {
      legend.replaceChildren(...LEGEND.filter(([kind]) => kind !== "diagonal" || values.causal).map(([kind, text]) =>
        h("span", {}, h("span", { class: `mlf-swatch mlf-${kind}-swatch` }), text)));
      drawing.update({ values, found, act });
      bars.update({ found });
      plot.update(roof(found, values));
      const [strong, rest] = verdict(found);
      line.replaceChildren(h("strong", {}, strong), rest);
      list.replaceChildren(...MLF.facts([
        ["Asked of memory", quantity(found.bytes, "B", 4), "as if there were no cache"],
        ["Each tensor once", quantity(found.least, "B", 4), "the least there can be"],
        ["Programs on an SM", number(found.programs), "at most, by shared memory and registers"],
        ["Time, at least", quantity(found.seconds, "s", 4), "arithmetic and traffic overlap"],
      ]));
    };
  }

  MLF.start({ name: "tiles", title: "Tile and traffic sandbox", groups, compute, build });
})(globalThis);
