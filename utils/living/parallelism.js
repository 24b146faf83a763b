/* The parallelism timeline: a ring's messages, data parallelism's buckets beside the backward pass, a pipeline's bubble; all
   drawn to scale in time. */
(function (root) {
  "use strict";

  const { MLF, MLF_DATA: data } = root;
  const { h, s } = MLF;
  const { dataParallelStep, ringSeconds, ringStates, ORDERS, simulate, timeline } = MLF.schedules;
  const { ringVolume, sendingRate } = MLF.formulas;
  const { number, quantity, many } = MLF.units;

  const entries = Object.entries;
  const choice = (value, text) => ({ value, text });
  const range = (count, from = 0) => Array.from({ length: count }, (_, i) => i + from);
  const gpus = entries(data.devices).filter(([, device]) => device.kind === "GPU" && (device.peakFlops.bf16 || device.peakFlops.fp16));
  const MOST_RINGED = 12; // ranks whose chunks are drawn
  const LARGE = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];

  const SCHEDULES = {
    naive: "one micro-batch at a time", gpipe: "GPipe", one_f_one_b: "1F1B", interleaved: "interleaved 1F1B",
    zero_bubble: "zero-bubble H1", zero_bubble_2: "zero-bubble H2",
  };

  const sends = (text) => text.mode !== "pipeline";
  const trains = (text) => text.mode === "data";
  const pipes = (text) => text.mode === "pipeline";
  const interleaves = (text) => pipes(text) && text.schedule === "interleaved";

  /** Numbers of micro-batches that the slider offers: with chunks, multiples of the stages. */
  function micros(text) {
    const p = interleaves(text) ? Number(text.stages) || 1 : 1;
    return range(Math.floor(64 / p), 1).map((each) => each * p);
  }

  const groups = [
    {
      legend: "What runs",
      fields: [
        { id: "mode", label: "Show", kind: "choice", wide: true, initial: "data",
          options: [choice("ring", "one ring all-reduce"), choice("data", "data parallelism"), choice("pipeline", "a pipeline")] },
        { id: "ranks", label: "Ranks N", kind: "whole", initial: "4", least: 2, most: 64, slider: () => range(63, 2), when: sends },
        { id: "buckets", label: "Buckets", kind: "whole", initial: "6", least: 1, most: 256, slider: () => LARGE, when: trains },
        { id: "overlap", label: "a bucket leaves as soon as it is full", kind: "flag", initial: "1", when: trains },
        { id: "schedule", label: "Schedule", kind: "choice", wide: true, initial: "one_f_one_b", when: pipes,
          options: entries(SCHEDULES).map(([value, text]) => choice(value, text)) },
        { id: "stages", label: "Stages p", kind: "whole", initial: "4", least: 1, most: 16, slider: () => range(16, 1), when: pipes },
        { id: "micro", label: "Micro-batches m", kind: "whole", initial: "8", least: 1, most: 64, slider: micros, when: pipes },
        { id: "chunks", label: "Chunks of layers v", kind: "whole", initial: "2", least: 1, most: 4, slider: () => range(4, 1), when: interleaves, hint: "on each stage" },
      ],
    },
    {
      legend: "How long it takes",
      fields: [
        { id: "size", label: "Tensor", unit: "MB", kind: "number", initial: "64", least: 0.000001, most: 1e9, when: (text) => text.mode === "ring" },
        { id: "psi", label: "Parameters Ψ", kind: "whole", initial: "7B", least: 1, most: 1e14, when: trains },
        { id: "tokens", label: "Tokens per step", kind: "whole", initial: "2048", least: 1, most: 1e9, hint: "on each rank", when: trains,
          slider: () => range(15, 7).map((power) => 2 ** power) },
        { id: "sent", label: "Gradients sent as", kind: "choice", initial: "bf16", when: trains,
          options: ["bf16", "fp32"].map((name) => choice(name, `${name}, ${data.elementSize[name]} B`)) },
        { id: "gpu", label: "GPU", kind: "choice", initial: "H100", when: sends, options: gpus.map(([value, device]) => choice(value, device.label)) },
        { id: "link", label: "Link", kind: "choice", initial: "nvlink", when: sends, options: entries(data.links).map(([id, link]) => choice(id, link.label)) },
        { id: "bandwidth", label: "Each rank sends at", unit: "GB/s", kind: "number", initial: "100", least: 0.001, most: 1e6, when: (text) => sends(text) && text.link === "own" },
        { id: "latency", label: "Latency of a message", unit: "µs", kind: "number", initial: "5", least: 0, most: 1e6, when: sends },
        { id: "ratio", label: "Backward over forward", kind: "number", initial: "2", least: 0.1, most: 10, when: pipes },
        { id: "last", label: "Last stage takes", unit: "times", kind: "number", initial: "1", least: 0.1, most: 10, hint: "1: as long as the others", when: pipes },
      ],
    },
  ];

  /** With chunks the micro-batches are a multiple of the stages: the next one, when stages or schedule change. */
  function changed(id, text) {
    const [p, m] = [Number(text.stages), Number(text.micro)];
    if (!interleaves(text) || !["stages", "schedule"].includes(id) || !(p >= 1 && p <= 16) || !(m >= 1)) return {};
    return { micro: String(Math.min(Math.ceil(m / p), Math.floor(64 / p)) * p) };
  }

  /* ---- what is computed ---- */

  const rateOf = (device) => (device.peakFlops.bf16 ? "bf16" : "fp16");

  function computeRing(values, bandwidth) {
    const [ranks, bytes, latency] = [Number(values.ranks), values.size * 1e6, values.latency * 1e-6];
    const seconds = ringSeconds("all_reduce", bytes, ranks, bandwidth, latency);
    return { ranks, bytes, seconds, sentBytes: ringVolume("all_reduce", bytes, ranks), busBandwidth: ringVolume("all_reduce", bytes, ranks) / seconds,
      even: ranks * bandwidth * latency, messageBytes: bytes / ranks, message: seconds / (2 * (ranks - 1)), latency };
  }

  function computeData(values, device, bandwidth) {
    const [ranks, psi, buckets] = [Number(values.ranks), Number(values.psi), Number(values.buckets)];
    const [peakFlops, elementSize, latency] = [device.peakFlops[rateOf(device)], data.elementSize[values.sent], values.latency * 1e-6];
    const step = dataParallelStep(psi, ranks, buckets, Number(values.tokens), { peakFlops, bandwidth, latency, elementSize, overlap: values.overlap });
    return { ranks, peakFlops, bandwidth, latency, ...step, bucketBytes: (elementSize * psi) / buckets, messageBytes: (elementSize * psi) / buckets / ranks,
      message: step.each / (2 * (ranks - 1)), sentBytes: ringVolume("all_reduce", elementSize * psi, ranks),
      tokensToHide: (step.communication * peakFlops) / (4 * psi) };
  }

  function computePipeline(values) {
    const [p, m, v] = [Number(values.stages), Number(values.micro), values.schedule === "interleaved" ? Number(values.chunks) : 1];
    const forward = range(p).map((stage) => (stage === p - 1 ? values.last : 1));
    const backward = forward.map((each) => each * values.ratio);
    const orders = ORDERS[values.schedule](p, m, v);
    const work = simulate(orders, m, v, forward, backward);
    return { p, m, v, work, ...timeline(orders, m, v, work), split: work.some(({ kind }) => kind === "W") };
  }

  function compute(values) {
    if (values.mode === "pipeline") return computePipeline(values);
    const device = data.devices[values.gpu];
    const [bandwidth, source] = sendingRate(data, values, device);
    return { bandwidth, device, source, ...(values.mode === "ring" ? computeRing(values, bandwidth) : computeData(values, device, bandwidth)) };
  }

  /* ---- moments: what the steps step through ---- */

  const MOST_MESSAGES = 600;

  /** Messages of a bucket's all-reduce: number i of `count` starts at `start + i * message`. */
  function dataMoments(found) {
    const count = 2 * (found.ranks - 1);
    const each = found.buckets.length * count <= MOST_MESSAGES ? count : 1;
    const moments = [{ time: 0 }, { time: found.forward }, { time: found.arithmetic }, { time: found.seconds }];
    found.buckets.forEach(({ start }) => range(each).forEach((i) => moments.push({ time: start + i * found.message })));
    moments.sort((a, b) => a.time - b.time);
    return moments.filter(({ time }, i) => !i || time > moments[i - 1].time * (1 + 1e-12)).map(({ time }) => time);
  }

  function momentsOf(values, found) {
    if (values.mode === "ring") return range(2 * (found.ranks - 1) + 1).map((i) => i * found.message);
    if (values.mode === "data") return dataMoments(found);
    return [...new Set([...found.work.map(({ start }) => start), found.makespan])].sort((a, b) => a - b)
      .filter((time, i, all) => !i || time - all[i - 1] > 1e-9);
  }

  const moments = (values, found) => (found.moments = found.moments || momentsOf(values, found));

  /** Which bucket and which of its messages is on the link at `time`: {bucket, message} or null. */
  function onLink(found, time) {
    const bucket = found.buckets.findIndex(({ start, end }) => start <= time * (1 + 1e-12) && time < end * (1 - 1e-12));
    if (bucket < 0 || !found.message) return null;
    const message = Math.floor((time - found.buckets[bucket].start) / found.message + 1e-6);
    return { bucket, message: Math.max(0, Math.min(message, 2 * found.ranks - 3)) };
  }

  const half = (ranks, message) => (message < ranks - 1 ? "reduce-scatter" : "all-gather");

  /* ---- drawing ---- */

  const rectangle = (x, y, wide, high) => `M${x.toFixed(2)} ${y.toFixed(2)}h${wide.toFixed(2)}v${high}h${(-wide).toFixed(2)}z`;
  const LETTER = 6.7;
  const text = (x, y, words, attributes = {}) => s("text", { x, y, ...attributes }, words);

  /** A hatched pattern for a drawing, named after its figure: [element, fill]. */
  function hatch(key) {
    const id = `mlf-${key}-hatch`;
    return [s("defs", {}, s("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { class: "mlf-idle-ground", width: 6, height: 6 }), s("line", { class: "mlf-idle-line", x1: 0, x2: 0, y1: 0, y2: 6 }))), `url(#${id})`];
  }

  /** A time axis below `y`. */
  function timeAxis(x, left, right, y, unit, name) {
    const group = s("g", { class: "mlf-axes" }, s("line", { class: "mlf-axis", x1: left, x2: right, y1: y, y2: y }));
    for (const tick of x.ticks) {
      const at = x.at(tick);
      if (at > right + 1) continue;
      const words = unit ? quantity(tick, unit, 3) : number(tick, 4);
      const anchor = at + (LETTER * words.length) / 2 > right + 8 ? "end" : at - (LETTER * words.length) / 2 < left ? "start" : "middle";
      group.append(s("line", { class: "mlf-axis", x1: at, x2: at, y1: y, y2: y + 4 }), text(anchor === "end" ? right : at, y + 17, words, { "text-anchor": anchor }));
    }
    group.append(text(right, y + 34, name, { "text-anchor": "end" }));
    return group;
  }

  /** The moment that is shown: a line over the lanes, below their names, with a knob that can be dragged. */
  function cursor(figure, view, x, top, bottom, names = []) {
    const { times, step, act, said } = view;
    const at = x.at(times[step]);
    return [s("line", { class: "mlf-now", x1: at, x2: at, y1: top, y2: bottom }), ...names,
      MLF.handle(figure, "time", { x: at, y: top, axis: "x", value: times[step], values: times, label: "moment that is shown",
        text: said, at: x.from, change: (time) => act.go(times.indexOf(time)) })];
  }

  /* ---- a ring: its messages to scale, and what each chunk holds ---- */

  /** The messages of one all-reduce from `left` to `right`: a latency and a transfer each; the one on its way is framed. */
  function strip(found, current, left, right, y) {
    const count = 2 * (found.ranks - 1);
    const wide = (right - left) / count;
    const share = found.message ? found.latency / found.message : 0;
    const gap = wide > 6 ? 1 : 0;
    const group = s("g", {});
    const [wait, move, gather] = [[], [], []];
    for (const i of range(count)) {
      const x = left + i * wide;
      wait.push(rectangle(x, y, share * wide, 24));
      const to = i < found.ranks - 1 ? move : gather;
      to.push(rectangle(x + share * wide, y, Math.max(0, (1 - share) * wide - gap), 24));
    }
    group.append(s("path", { class: "mlf-latency", d: wait.join("") }), s("path", { class: "mlf-sent", d: move.join("") }),
      s("path", { class: "mlf-sent mlf-gathered", d: gather.join("") }));
    if (current !== null) group.append(s("rect", { class: "mlf-frame", x: left + current * wide - 1, y: y - 2, width: Math.max(3, wide - gap + 2), height: 28, rx: 2 }));
    const middle = left + (found.ranks - 1) * wide;
    const short = middle - left < 15 * LETTER;
    group.append(text(left + 5, y - 8, short ? "reduce" : "reduce-scatter"), text(middle, y - 8, short ? "gather" : "all-gather"));
    return group;
  }

  /** Ranks one below the other, their chunks side by side. A chunk's slots are the ranks; those are filled whose data it holds. */
  function matrix(ranks, message, left, right, y) {
    const { states, sent } = ringStates(ranks);
    const state = states[message === null ? 2 * (ranks - 1) : message];
    const moving = message === null ? [] : sent[message];
    const label = 52;
    const wide = Math.min(104, (right - left - label) / ranks);
    const high = ranks <= 6 ? 26 : 18;
    const gap = 14;
    const all = 2 ** ranks - 1;
    const group = s("g", {});
    const [slots, own] = [[], []];
    const corner = (rank, chunk) => [left + label + chunk * wide, y + 18 + rank * (high + gap)];
    for (const chunk of range(ranks)) group.append(text(left + label + (chunk + 0.5) * wide - 2.5, y + 4, wide > 58 ? `chunk ${chunk}` : chunk, { "text-anchor": "middle" }));
    state.forEach((row, rank) => {
      group.append(text(left, y + 18 + rank * (high + gap) + high / 2 + 4, `rank ${rank}`));
      row.forEach((held, chunk) => {
        const [cx, cy] = corner(rank, chunk);
        const inner = wide - 5;
        group.append(s("rect", { class: held === all ? "mlf-chunk mlf-whole" : "mlf-chunk", x: cx, y: cy, width: inner, height: high, rx: 2 }));
        for (const each of range(ranks)) if ((held >> each) & 1) (each === rank ? own : slots).push(rectangle(cx + 1 + (each * (inner - 2)) / ranks, cy + 1, (inner - 2) / ranks, high - 2));
      });
    });
    group.append(s("path", { class: "mlf-held", d: slots.join("") }), s("path", { class: "mlf-held mlf-own", d: own.join("") }));
    for (const { source, target, chunk } of moving) {
      const [cx, cy] = corner(source, chunk);
      const [, ty] = corner(target, chunk);
      const middle = cx + (wide - 5) / 2;
      group.append(s("rect", { class: "mlf-leaving", x: cx - 1.5, y: cy - 1.5, width: wide - 2, height: high + 3, rx: 3 }));
      const last = target < source; // from the last rank back to the first: out at the bottom, in at the top
      group.append(arrow(middle, cy + high, last ? cy + high + gap - 2 : ty - 1));
      if (last) group.append(arrow(middle, ty - gap + 6, ty - 1));
    }
    return [group, 18 + ranks * (high + gap)];
  }

  const arrow = (x, from, to) => s("path", { class: "mlf-arrow", d: `M${x} ${from}V${to - 4}M${x - 4} ${to - 6}L${x} ${to}L${x + 4} ${to - 6}` });

  /** The strip of messages at `y`, `room` pixels below it what the chunks hold; gives where all of it ends. */
  function ringBlock(svg, found, message, left, right, y, room = 18) {
    svg.append(strip(found, message, left, right, y + 12));
    const below = y + 36 + room;
    if (found.ranks > MOST_RINGED) {
      svg.append(text(left, below + 8, `The chunks are drawn for up to ${MOST_RINGED} ranks.`));
      return below + 12;
    }
    const [picture, high] = matrix(found.ranks, message, left, right, below);
    svg.append(picture);
    return below + high;
  }

  function paintRing(width, view, figure) {
    const { found, step, times } = view;
    const [left, right] = [12, width - 12];
    const svg = s("svg", { class: "mlf-timeline", width, role: "group", "aria-label": view.label });
    const x = MLF.axis({ low: 0, high: found.seconds || 1, log: false }, left, right);
    const bottom = ringBlock(svg, found, step < times.length - 1 ? step : null, left, right, 36, 44);
    svg.append(timeAxis(x, left, right, 80, "s", ""), ...cursor(figure, view, x, 16, 80));
    return finish(svg, width, bottom + 2);
  }

  function finish(svg, width, height) {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    return svg;
  }

  /* ---- data parallelism ---- */

  /** A bar with its name in it where that fits, in the first of `names` that does. */
  function bar(x, from, to, y, high, className, names = []) {
    const [a, b] = [x.at(from), x.at(to)];
    const name = names.find((each) => b - a > LETTER * String(each).length + 6);
    return [s("rect", { class: className, x: a, y, width: Math.max(0.5, b - a), height: high }),
      name === undefined ? null : text((a + b) / 2, y + high / 2 + 4, name, { "text-anchor": "middle", class: `${className}-name` })];
  }

  function paintData(width, view, figure) {
    const { found, step, times } = view;
    const time = times[step];
    const narrow = width < 520;
    const [left, right, top, high] = [narrow ? 2 : 84, width - 12, 34, 34];
    const x = MLF.axis({ low: 0, high: found.seconds, log: false }, left, right);
    const [defs, waste] = hatch(view.act.key);
    const svg = s("svg", { class: "mlf-timeline", width, role: "group", "aria-label": view.label }, defs);
    const lane = (name, y) => (narrow ? text(left, y - 5, name) : text(left - 10, y + high / 2 + 4, name, { "text-anchor": "end" }));
    const [work, link] = [top + 8, top + high + (narrow ? 34 : 22)];
    const { buckets, forward, arithmetic, seconds } = found;
    const cuts = [forward, ...buckets.map(({ ready }) => ready)];
    const bars = [bar(x, 0, forward, work, high, "mlf-forward", ["forward", "F"])];
    if (buckets.length > 64) bars.push(bar(x, forward, arithmetic, work, high, "mlf-backward", ["backward"]));
    else cuts.slice(1).forEach((end, k) => bars.push(bar(x, cuts[k], end, work, high, "mlf-backward", buckets.length === 1 ? ["backward", "B"] : [k + 1])));
    svg.append(lane("arithmetic", work), ...bars.map(([rect]) => rect));
    const names = bars.map(([, name]) => name).filter(Boolean);
    if (found.exposed > 0) {
      const [a, b] = [x.at(arithmetic), x.at(seconds)];
      svg.append(s("rect", { class: "mlf-waits", fill: waste, x: a, y: work, width: Math.max(0.5, b - a), height: high }),
        ...(b - a > 80 ? [text((a + b) / 2, work + high / 2 + 4, "waits", { "text-anchor": "middle", class: "mlf-label" })] : []));
    }
    svg.append(lane("link", link), s("rect", { class: "mlf-lane", x: left, y: link, width: right - left, height: high }));
    const now = onLink(found, time);
    const [drawn, numbers] = messages(found, x, link, high);
    svg.append(...drawn);
    if (buckets.length <= 24) buckets.forEach(({ ready, start }) => {
      if (found.each) svg.append(s("path", { class: "mlf-leads", d: `M${x.at(ready)} ${work + high}L${x.at(start)} ${link}` }));
    });
    if (now) svg.append(s("rect", { class: "mlf-frame", x: x.at(buckets[now.bucket].start) - 1, y: link - 2, width: x.at(buckets[now.bucket].end) - x.at(buckets[now.bucket].start) + 2, height: high + 4, rx: 2 }));
    const bottom = link + high + 10;
    svg.append(timeAxis(x, left, right, bottom, "s", ""), ...cursor(figure, view, x, top - 8, bottom, [...names, ...numbers]));
    let y = bottom + 44;
    const words = now ? `bucket ${now.bucket + 1}, ${quantity(found.bucketBytes, "B", 3)}, in ${2 * (found.ranks - 1)} messages` : "the link is idle";
    svg.append(text(2, y, words, { class: "mlf-label mlf-strong" }));
    y = found.each ? ringBlock(svg, found, now && now.message, 2, right, y + 18) : y;
    return finish(svg, width, y + 4);
  }

  /** The all-reduces on the link: each bucket, with its messages where they are wide enough to be told apart. */
  function messages(found, x, y, high) {
    const { buckets, ranks, each, latency, message } = found;
    if (!each) return [[], []];
    const count = 2 * (ranks - 1);
    const wide = x.at(message) - x.at(0);
    const [wait, move] = [[], []];
    const names = [];
    for (const [k, { start, end }] of buckets.entries()) {
      const [a, b] = [x.at(start), x.at(end)];
      if (wide < 3) move.push(rectangle(a, y, Math.max(0.3, b - a - (b - a > 4 ? 1 : 0)), high));
      else for (const i of range(count)) {
        const at = x.at(start + i * message);
        const pale = (latency / message) * wide;
        wait.push(rectangle(at, y, pale, high));
        move.push(rectangle(at + pale, y, Math.max(0.3, wide - pale - (wide > 5 ? 1 : 0.5)), high));
      }
      if (b - a > LETTER * String(k + 1).length + 10) names.push(text((a + b) / 2, y + high / 2 + 4, k + 1, { "text-anchor": "middle", class: "mlf-sent-name" }));
    }
    return [[s("path", { class: "mlf-latency", d: wait.join("") }), s("path", { class: "mlf-sent", d: move.join("") })], names];
  }

  /* ---- pipeline ---- */

  const CLASS = { F: "mlf-forward", B: "mlf-backward", W: "mlf-weights" };

  /** The micro-batches (and chunks) whose activations a stage holds at `time`. */
  function heldAt(found, time) {
    const held = range(found.p).map(() => new Map());
    const last = found.split ? "W" : "B";
    for (const { stage, kind, micro, chunk, start, end } of found.work) {
      if (kind === "F" && start <= time + 1e-9) held[stage].set(`${micro}.${chunk}`, micro);
      if (kind === last && end <= time + 1e-9) held[stage].delete(`${micro}.${chunk}`);
    }
    return held.map((each) => [...each.values()].sort((a, b) => a - b));
  }

  function paintPipeline(width, view, figure) {
    const { found, step, times } = view;
    const { p, work, makespan, v } = found;
    const time = times[step];
    const narrow = width < 520;
    const [left, right, top] = [narrow ? 24 : 62, width - 12, 26];
    const [row, gap] = [p <= 8 ? 27 : 19, 3];
    const x = MLF.axis({ low: 0, high: makespan, log: false }, left, right);
    const [defs, waste] = hatch(view.act.key);
    const svg = s("svg", { class: "mlf-timeline", width, role: "group", "aria-label": view.label }, defs);
    const place = (stage) => top + 10 + stage * (row + gap);
    const named = (stage) => (narrow ? stage : `stage ${stage}`);
    const paths = new Map();
    const names = [];
    for (const stage of range(p)) svg.append(text(left - 8, place(stage) + row / 2 + 4, named(stage), { "text-anchor": "end" }));
    svg.append(s("path", { fill: waste, class: "mlf-waits", d: range(p).map((stage) => rectangle(left, place(stage), right - left, row)).join("") }));
    for (const { stage, kind, micro, chunk, start, end } of work) {
      const [a, b] = [x.at(start), x.at(end)];
      const key = `${CLASS[kind]} mlf-chunk-${v > 1 ? chunk : 0}`;
      if (!paths.has(key)) paths.set(key, []);
      const edge = b - a > 3 ? 0.5 : 0;
      paths.get(key).push(rectangle(a + edge, place(stage), Math.max(0.4, b - a - 2 * edge), row));
      if (b - a > LETTER * String(micro).length + 3 && row > 14) names.push(text((a + b) / 2, place(stage) + row / 2 + 4, micro, { "text-anchor": "middle", class: `${CLASS[kind]}-name mlf-chunk-${v > 1 ? chunk : 0}-name` }));
    }
    for (const [className, pieces] of paths) svg.append(s("path", { class: className, d: pieces.join("") }));
    const bottom = place(p) + 2;
    svg.append(timeAxis(x, left, right, bottom, "", narrow ? "time, in forward passes" : "time, in forward passes of a stage"), ...cursor(figure, view, x, top - 6, bottom, names));
    let y = bottom + 58;
    svg.append(text(2, y, narrow ? "micro-batches in flight at this moment" : "what each stage holds at this moment: micro-batches in flight", { class: "mlf-label mlf-strong" }));
    y += 10;
    const held = heldAt(found, time);
    const room = (right - left) / Math.max(8, ...found.peaks);
    const [wide, high] = [Math.min(26, room), p <= 8 ? 20 : 14];
    for (const stage of range(p)) {
      svg.append(text(left - 8, y + high / 2 + 4, named(stage), { "text-anchor": "end" }));
      svg.append(s("rect", { class: "mlf-lane", x: left, y, width: Math.max(1, found.peaks[stage] * wide), height: high }));
      held[stage].forEach((micro, i) => svg.append(s("rect", { class: "mlf-activation", x: left + i * wide + 0.5, y, width: wide - 1, height: high }),
        ...(wide > LETTER * String(micro).length + 3 ? [text(left + (i + 0.5) * wide, y + high / 2 + 4, micro, { "text-anchor": "middle", class: "mlf-activation-name" })] : [])));
      y += high + 4;
    }
    return finish(svg, width, y + 2);
  }

  /* ---- words ---- */

  const percent = (share) => `${number(100 * share, 3)} %`;
  const time = (seconds) => quantity(seconds, "s", 3);

  function saidRing(found, step) {
    const last = 2 * (found.ranks - 1);
    if (step === last) return `After ${time(found.seconds)}: every rank holds the sum of all ${found.ranks} in each of its ${found.ranks} chunks.`;
    const message = sentence(found.ranks, step);
    return `${time(step * found.message)}, message ${step + 1} of ${last} (${half(found.ranks, step)}): ${message}`;
  }

  function sentence(ranks, message) {
    if (ranks > MOST_RINGED) return "each rank sends a chunk to the next.";
    const { source, target, chunk } = ringStates(ranks).sent[message][0];
    return `rank ${source} sends chunk ${chunk} to rank ${target}, and every other rank a chunk to its next.`;
  }

  function saidData(found, at) {
    const now = onLink(found, at);
    const filling = found.buckets.findIndex(({ ready }) => at < ready * (1 - 1e-12));
    const computes = at < found.forward * (1 - 1e-12) ? "the forward pass runs" : filling >= 0 && at < found.arithmetic * (1 - 1e-12) ? `the backward pass computes bucket ${filling + 1}` : at < found.seconds * (1 - 1e-12) ? "nothing is left to compute" : "all gradients are summed, the optimizer can step";
    const sent = now ? `; on the link is bucket ${now.bucket + 1}, message ${now.message + 1} of ${2 * (found.ranks - 1)} (${half(found.ranks, now.message)}).` : "; the link is idle.";
    return `After ${time(at)} ${computes}${at < found.seconds * (1 - 1e-12) ? sent : "."}`;
  }

  function saidPipeline(found, at) {
    const now = found.work.filter(({ start, end }) => start <= at + 1e-9 && at < end - 1e-9);
    const held = heldAt(found, at).map((each) => each.length);
    if (!now.length) return `Time ${number(at, 4)}: the step is over.`;
    const doing = found.p <= 6 ? range(found.p).map((stage) => {
      const each = now.find((one) => one.stage === stage);
      return each ? `stage ${stage} ${each.kind}${each.micro}` : `stage ${stage} idle`;
    }).join(", ") : `${now.length} of ${found.p} stages work`;
    return `Time ${number(at, 4)}: ${doing}. In flight: ${held.join(", ")}.`;
  }

  function words(values, found, step) {
    if (values.mode === "ring") return saidRing(found, step);
    const at = moments(values, found)[step];
    return values.mode === "data" ? saidData(found, at) : saidPipeline(found, at);
  }

  function verdict(values, found) {
    if (values.mode === "ring") {
      const share = found.seconds ? (2 * (found.ranks - 1) * found.latency) / found.seconds : 0;
      return [`${time(found.seconds)}.`, share > 0.5 ? ` ${percent(share)} of it are latencies: a larger tensor would cost little more.` : ` ${percent(1 - share)} of it is the transfer of bytes.`];
    }
    if (values.mode === "data") {
      if (!values.overlap) return ["Nothing is hidden.", ` Each step waits ${time(found.exposed)} after its backward pass.`];
      const only = found.exposed <= found.each * (1 + 1e-9);
      const share = found.communication ? found.hidden / found.communication : 1;
      return [only ? "Only the last bucket is waited for." : "The link is slower than the backward pass.",
        ` ${percent(share)} of the communication is hidden, ${time(found.exposed)} are exposed: ${percent(found.exposed / found.seconds)} of the step.`];
    }
    const most = Math.max(...found.peaks) / found.v;
    return [`The bubble is ${percent(found.bubble)} of the working time.`, ` A stage has up to ${number(most, 3)} micro-batches in flight.`];
  }

  function figures(values, found) {
    if (values.mode === "ring") return [
      ["Time", time(found.seconds), `${2 * (found.ranks - 1)} messages of ${time(found.message)}`],
      ["Each rank sends", quantity(found.sentBytes, "B", 4), `2 (N − 1)/N of ${quantity(found.bytes, "B", 4)}`],
      ["A message", quantity(found.messageBytes, "B", 4), `at ${quantity(found.bandwidth, "B/s", 4)}`],
      ["Bus bandwidth", quantity(found.busBandwidth, "B/s", 4), "sent by a rank, over the time"],
      ["Latencies are half at", quantity(found.even, "B", 4), "N b τ"],
    ];
    if (values.mode === "data") return [
      ["A step", time(found.seconds), "until the optimizer can start"],
      ["Arithmetic", time(found.arithmetic), `forward ${time(found.forward)}, backward ${time(found.backward)}`],
      ["Communication", time(found.communication), `${many(found.buckets.length)} all-reduces of ${time(found.each)}`],
      ["Exposed", time(found.exposed), `${percent(found.exposed / found.seconds)} of the step`],
      ["Each rank sends", quantity(found.sentBytes, "B", 4), `2 (N − 1)/N of the gradients`],
      ["All but the last hide from", `${number(Math.ceil(found.tokensToHide), 4)} tokens`, "on each rank, with these buckets"],
    ];
    return [
      ["Bubble", percent(found.bubble), "idle over ideal time, (p − 1)/(v m) if all is even"],
      ["Idle", percent(found.idleFraction), "of all time of all stages"],
      ["A step takes", number(found.makespan, 5), "forward passes of a stage"],
      ["In flight at most", found.peaks.map((each) => number(each / found.v, 3)).join(" "), "stage 0 to the last; a chunk counts 1/v"],
    ];
  }

  /** All schedules with the same stages and micro-batches. */
  function comparison(values, found) {
    const rows = entries(SCHEDULES).map(([schedule, name]) => {
      const chunks = BigInt(values.chunks || 2);
      if (schedule === "interleaved" && found.m % found.p) return [name, "m is no multiple of p", "", ""];
      const each = computePipeline({ ...values, schedule, chunks });
      return [schedule === "interleaved" ? `${name}, v = ${chunks}` : name, percent(each.bubble), number(each.makespan, 5), number(Math.max(...each.peaks) / each.v, 3)];
    });
    return MLF.table(`${found.p} stages, ${found.m} micro-batches, under each schedule`, ["schedule", "bubble", "a step takes", "in flight"], rows, Object.keys(SCHEDULES).indexOf(values.schedule));
  }

  function legend(mode) {
    const key = (className, words) => h("span", {}, s("svg", { width: 14, height: 14, "aria-hidden": "true" }, s("rect", { class: className, x: 0.5, y: 0.5, width: 13, height: 13 })), words);
    const sent = [key("mlf-sent", "on the link"), key("mlf-latency", "latency")];
    const hold = [key("mlf-held mlf-own", "a rank’s own data"), key("mlf-held", "data of others"), key("mlf-chunk mlf-whole", "sum of all")];
    return { ring: [...sent, ...hold], data: [key("mlf-forward", "forward"), key("mlf-backward", "backward"), ...sent, key("mlf-idle-key", "waits"), ...hold],
      pipeline: [key("mlf-forward", "forward"), key("mlf-backward", "backward"), key("mlf-weights", "gradients of weights"), key("mlf-idle-key", "idle"), key("mlf-activation", "held activations")] }[mode];
  }

  const PAINT = { ring: paintRing, data: paintData, pipeline: paintPipeline };
  const CAPTION = { ring: "The messages of a ring all-reduce, to scale, and what each chunk holds", data: "One training step of a rank, to scale", pipeline: "One training step of all stages, to scale" };

  function labelOf(values, found) {
    const [strong, rest] = verdict(values, found);
    const what = { ring: `A ring all-reduce of ${found.ranks} ranks.`, data: `A step of data parallelism on ${found.ranks} ranks with ${found.buckets && found.buckets.length} buckets.`,
      pipeline: `${found.p} stages and ${found.m} micro-batches, ${SCHEDULES[values.schedule]}.` }[values.mode];
    return `${what} ${strong}${rest}`;
  }

  function build(host, act) {
    const line = h("p", { class: "mlf-verdict", role: "status" });
    const keys = h("div", { class: "mlf-legend" });
    const caption = h("figcaption", {}, "");
    const figure = h("figure", {}, caption, keys);
    const list = h("dl", { class: "mlf-facts simple" });
    const more = h("div", {});
    const used = h("div", {});
    host.append(figure, act.player, line, list, more, used);
    const drawing = new MLF.Drawing(figure, (width, view, self) => PAINT[view.mode](width, view, self));
    let [last, waiting] = [null, 0];
    return (values, found, step) => {
      const said = words(values, found, step);
      drawing.update({ mode: values.mode, found, step, times: moments(values, found), act, said, label: labelOf(values, found) });
      if (last === found) return said;
      last = found;
      caption.textContent = CAPTION[values.mode];
      keys.replaceChildren(...legend(values.mode));
      const [strong, rest] = verdict(values, found);
      line.replaceChildren(h("strong", {}, strong), rest);
      list.replaceChildren(...MLF.facts(figures(values, found)));
      clearTimeout(waiting); // six schedules are more than a frame has time for: the table follows when the hand rests
      more.hidden = values.mode !== "pipeline";
      if (!more.hidden) waiting = setTimeout(() => more.replaceChildren(...comparison(values, found)), more.firstChild ? 120 : 0);
      used.replaceChildren(MLF.sources(values.mode === "pipeline" ? [["Schedules and their simulation", SCHEDULES[values.schedule], "utils/schedules in the course’s repository; sending takes no time"]] : [
        ["Each rank sends at", quantity(found.bandwidth, "B/s"), found.source],
        ...(values.mode === "data" ? [[`${found.device.fullName}, ${rateOf(found.device)} peak, dense`, quantity(found.peakFlops, "FLOP/s"), found.device.sources.peakFlops]] : []),
        ["Time of a ring", "2 (N − 1) (τ + bytes/(N b))", "utils/transformer_math/communication.py; Patarasuk and Yuan 2009"],
      ]));
      return said;
    };
  }

  MLF.start({ name: "parallelism", title: "Parallelism timeline", groups, compute, build, changed, begin: 11,
    steps: (values, found) => moments(values, found).length - 1 });
})(globalThis);
