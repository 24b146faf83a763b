/* The serving explorer: what a GPU holds beside the weights, and how fast tokens can come. */
(function (root) {
  "use strict";

  const { MLF, MLF_DATA: data } = root;
  const { h } = MLF;
  const F = MLF.formulas;
  const { number, quantity, many } = MLF.units;

  const entries = Object.entries;
  const OWN = "own";
  const choice = (value, text, group) => ({ value, text, group });
  const servers = entries(data.devices).filter(([, device]) => device.memoryBytes);
  const rates = [...new Set(servers.flatMap(([, device]) => Object.keys(device.peakFlops)))];
  const stored = entries(data.elementSize).map(([name, size]) => choice(name, `${name}, ${size} B`));
  const own = (text) => text.model === OWN;

  const groups = [
    {
      legend: "Model",
      fields: [
        { id: "model", label: "Model", kind: "choice", initial: "Llama 3 8B",
          options: [...Object.keys(data.models).map((name) => choice(name, name)), choice(OWN, "of my own sizes")] },
        { id: "psi", label: "Parameters", kind: "whole", initial: "8e9", least: 1, most: 1e14, when: own },
        { id: "layers", label: "Layers L", kind: "whole", initial: "32", least: 1, most: 1e5, when: own },
        { id: "heads", label: "Query heads H", kind: "whole", initial: "32", least: 1, most: 1e5, when: own },
        { id: "kv_heads", label: "KV heads G", kind: "whole", initial: "8", least: 1, most: 1e5, when: own },
        { id: "head_dim", label: "Head dimension D", kind: "whole", initial: "128", least: 1, most: 1e5, when: own },
        { id: "weights", label: "Weights stored as", kind: "choice", initial: "bf16", options: stored },
        { id: "cache", label: "Cache stored as", kind: "choice", initial: "bf16", options: stored },
      ],
    },
    {
      legend: "Device",
      fields: [
        { id: "gpu", label: "Device", kind: "choice", initial: "H100", options: servers.map(([value, device]) => choice(value, device.label, device.group)) },
        { id: "rate", label: "Arithmetic in", kind: "choice", initial: "bf16", options: rates.map((value) => choice(value, value)) },
      ],
    },
    {
      legend: "Requests",
      fields: [
        { id: "batch", label: "Sequences B", kind: "whole", initial: "16", least: 1, most: 1e6 },
        { id: "prompt", label: "Prompt tokens p", kind: "whole", initial: "1792", least: 1, most: 1e8 },
        { id: "new", label: "New tokens g", kind: "whole", initial: "256", least: 1, most: 1e8 },
      ],
    },
  ];

  function modelOf(values) {
    if (values.model !== OWN) return data.models[values.model];
    return F.servedModel({
      parameters: values.psi, multiplied: values.psi, layers: values.layers, num_heads: values.heads,
      kv_heads: values.kv_heads, head_dim: values.head_dim, max_seq_len: 10n ** 9n,
    });
  }

  function compute(values) {
    const device = data.devices[values.gpu];
    const model = modelOf(values);
    const formats = { weights: values.weights, cache: values.cache, arithmetic: values.rate };
    F.peak(device, values.rate);
    const context = Number(values.prompt + values.new);
    if (context > Number(model.max_seq_len)) {
      throw new MLF.InputError("new", `${number(values.prompt)} + ${number(values.new)} tokens are more than the ${number(BigInt(model.max_seq_len))} of ${values.model}’s context`);
    }
    const perToken = F.kvBytesPerToken(data, model, values.cache);
    const weights = F.weightBytes(data, model, values.weights);
    const middle = Number(values.prompt) + Number(values.new) / 2; // the mean context of the decode steps
    const caches = Number(values.batch) * context * perToken;
    const largest = F.largestBatch(data, model, device.memoryBytes, context, formats);
    return {
      device, model, formats, context, perToken, weights, middle, caches, largest,
      fits: Number(values.batch) <= largest,
      prefill: F.prefillBounds(data, model, device, values.prompt, values.batch, formats),
      alone: F.prefillBounds(data, model, device, values.prompt, 1, formats),
      step: F.decodeBounds(data, model, device, values.batch, middle, formats),
      request: F.requestBounds(data, model, device, values.batch, values.prompt, values.new, formats),
    };
  }

  /* ---- what is shown ---- */

  function verdict(found, values) {
    const { largest, device } = found;
    const memory = quantity(device.memoryBytes, "B", 4);
    if (found.weights > device.memoryBytes) return ["The weights alone do not fit:", ` ${quantity(found.weights, "B", 4)}, of ${memory} on one ${device.name}. The times below are those of a device with more memory.`];
    if (!found.fits) return [`A batch of ${number(values.batch)} does not fit.`, ` Beside the weights one ${device.name} holds ${largest ? number(BigInt(largest)) : "not one"} ${largest > 1 ? "sequences" : "sequence"} of ${number(found.context, 6)} tokens. The times below are those of a device with more memory.`];
    const rate = number(found.request.throughput, 4);
    if (values.new === 1n) return [`The batch fits (up to ${number(BigInt(largest))} do).`, ` One token each, after ${quantity(found.request.ttft, "s", 3)} at least.`];
    return [`The batch fits (up to ${number(BigInt(largest))} do).`, ` First token after ${quantity(found.request.ttft, "s", 3)}, then one every ${quantity(found.request.tpot, "s", 3)}, at least; ${rate} tokens/s for all, at most.`];
  }

  const BOUND = { compute: "arithmetic", memory: "memory" };
  const limits = (part) => `mostly ${BOUND[part.boundBy]}`;

  function figures(found, values) {
    const { step, request } = found;
    const one = values.new === 1n;
    const reading = step.readWeights > step.multiply ? "read" : "multiplied";
    return [
      ["Weights", quantity(found.weights, "B", 4), `${many(Number(found.model.parameters))} parameters in ${values.weights}`],
      ["Cache of a token", quantity(found.perToken, "B", 4), "2 L G D e, all layers"],
      ["Cache of a sequence", quantity(found.context * found.perToken, "B", 4), `${number(found.context, 7)} tokens at the end`],
      ["Cache of the batch", quantity(found.caches, "B", 4), `${number((100 * (found.weights + found.caches)) / found.device.memoryBytes, 3)} % of memory, with the weights`],
      ["Sequences that fit", number(BigInt(found.largest)), `of ${number(found.context, 7)} tokens`],
      ["TTFT, at least", quantity(request.ttft, "s", 4), `all ${number(values.batch)} prompts in one prefill; ${limits(found.prefill)}`],
      ["TTFT alone, at least", quantity(found.alone.seconds, "s", 4), `one prompt; ${limits(found.alone)}`],
      ["TPOT, at least", one ? "–" : quantity(request.tpot, "s", 4), one ? "a single token has no gap" : `${limits(step)}`],
      ["of TPOT, the weights", one ? "–" : quantity(Math.max(step.readWeights, step.multiply), "s", 4), one ? "" : `${reading}; the other takes ${quantity(Math.min(step.readWeights, step.multiply), "s", 3)}`],
      ["of TPOT, the caches", one ? "–" : quantity(step.readCaches, "s", 4), one ? "" : `read at ${number(found.middle, 7)} tokens, the mean`],
      ["Latency, at least", quantity(request.latency, "s", 4), `TTFT + ${number(values.new - 1n)} TPOT`],
      ["Throughput, at most", `${number(request.throughput, 4)} tokens/s`, one ? "prefill alone" : `with prefill; ${number(Number(values.batch) / request.tpot, 4)} while decoding`],
    ];
  }

  /** A curve over batches: solid up to the memory's limit, dashed beyond. */
  function curve(value, found, high) {
    const points = (from, to) => Array.from({ length: 121 }, (_, i) => from * (to / from) ** (i / 120)).map((b) => [b, value(b)]);
    const end = Math.min(Math.max(found.largest, 1), high);
    const lines = found.largest > 1 ? [{ points: points(1, end), className: "mlf-hbm" }] : [];
    return high > end ? [...lines, { points: points(end, high), className: "mlf-hbm mlf-beyond" }] : lines;
  }

  function panel(value, found, values, shape) {
    const high = 2 ** Math.ceil(Math.log2(Math.max(found.largest, Number(values.batch), 4) * 1.5));
    const ends = [value(1), value(high)];
    const at = Number(values.batch);
    return {
      height: 230,
      label: `${shape.name} over the batch, both axes logarithmic: ${shape.say(value(1))} for one sequence, ${shape.say(value(at))} for ${number(values.batch)}. Memory ends at ${number(BigInt(found.largest))} sequences.`,
      x: { low: 1, high, log: true, name: "batch, sequences" },
      y: { low: ends[0] / 1.6, high: ends[1] * 1.8, log: true, unit: shape.unit, name: shape.name },
      areas: [{ from: Math.max(1, found.largest), to: high, className: "mlf-full", label: "does not fit" }],
      lines: curve(value, found, high),
      marks: found.largest >= 1 ? [{ x: found.largest, className: "mlf-limit", label: `memory ends at ${number(BigInt(found.largest))}` }] : [],
      points: [{ x: at, y: value(at), className: found.fits ? "mlf-hbm" : "mlf-over-point", label: shape.say(value(at)) }],
    };
  }

  const rateShape = { name: "tokens/s", unit: "", say: (value) => `${number(value, 3)} tokens/s` };
  const gapShape = { name: "TPOT", unit: "s", say: (value) => quantity(value, "s", 3) };

  /** decodeBounds asks for whole batches; between them the curve is the formula's straight continuation. */
  function between(found) {
    const [one, two] = [1, 2].map((b) => F.decodeBounds(data, found.model, found.device, b, found.middle, found.formats));
    return (b) => Math.max(one.readWeights, b * one.multiply) + b * (two.readCaches - one.readCaches);
  }

  function build(host) {
    const line = h("p", { class: "mlf-verdict", role: "status" });
    const list = h("dl", { class: "mlf-facts simple" });
    const upper = h("figure", {}, h("figcaption", {}, "Throughput of decoding over the batch"));
    const lower = h("figure", {}, h("figcaption", {}, "What each user waits for it: time per output token"));
    const slider = h("div", {});
    const used = h("div", {});
    host.append(upper, lower, slider, line, list, used);
    const plots = [new MLF.Plot(upper), new MLF.Plot(lower)];
    const probe = new MLF.Probe(slider, plots, "Read both at a batch", "mlf-serving-probe");
    return (values, found) => {
      const [strong, rest] = verdict(found, values);
      line.replaceChildren(h("strong", {}, strong), rest);
      line.classList.toggle("mlf-bad", !found.fits);
      list.replaceChildren(...MLF.facts(figures(found, values)));
      const gap = between(found);
      const views = [panel((b) => b / gap(b), found, values, rateShape), panel(gap, found, values, gapShape)];
      plots.forEach((plot, i) => plot.update(views[i]));
      probe.update(views[0].x, (asked) => {
        const b = Math.max(1, Math.round(asked));
        const seconds = gap(b);
        const fits = b <= found.largest ? "" : "; does not fit";
        return { x: b, ys: [[b / seconds], [seconds]], text: `${number(BigInt(b))} sequences: ${rateShape.say(b / seconds)}, a token every ${gapShape.say(seconds)}${fits}.` };
      }, Number(values.batch));
      const { device } = found;
      used.replaceChildren(MLF.sources([
        [`${device.fullName}, memory`, quantity(device.memoryBytes, "B"), device.sources.memoryBytes],
        [`${device.fullName}, memory bandwidth`, quantity(device.memoryBandwidth, "B/s"), device.sources.memoryBandwidth],
        [`${device.fullName}, ${values.rate} peak, dense`, quantity(F.peak(device, values.rate), "FLOP/s"), device.sources.peakFlops],
        ...(own({ model: values.model }) ? [] : [[`${values.model}`, `${number(BigInt(found.model.parameters))} parameters, L ${found.model.layers}, H ${found.model.num_heads}, G ${found.model.kv_heads}, D ${found.model.head_dim}`, found.model.source]]),
      ]));
    };
  }

  MLF.start({ name: "serving", title: "Serving explorer", groups, compute, build });
})(globalThis);
