/* The formulas of the living figures, the same as those of `utils` in the course's repository: each function names the one
   that it repeats, and tests/test_site_explorers.py holds both against each other. Pure: no document, no state.

   Counts (FLOPs, bytes of an operator) are BigInt, exact as in Python; times, rates and shares are numbers. What is
   no possible input throws an InputError that names the field. */
(function (root) {
  "use strict";

  const MLF = (root.MLF = root.MLF || {});

  /** What is wrong with one input: `field` is its name, `message` says what would be right. */
  class InputError extends Error {
    constructor(field, message) {
      super(message);
      this.name = "InputError";
      this.field = field;
    }
  }

  /* ---- inputs ---- */

  /** A whole number of at least `least` as BigInt. */
  function whole(field, value, least = 1n) {
    const isWhole = typeof value === "bigint" || (typeof value === "number" && Number.isSafeInteger(value));
    if (!isWhole) throw new InputError(field, `must be a whole number, got ${value}`);
    const count = BigInt(value);
    if (count < least) throw new InputError(field, `must be at least ${least}, got ${count}`);
    return count;
  }

  /** A finite number above 0, or from 0 on where `zero` says so. */
  function positive(field, value, zero = false) {
    if (typeof value !== "number" || !Number.isFinite(value)) {
      throw new InputError(field, `must be a number, got ${value}`);
    }
    if (value < 0 || (value === 0 && !zero)) {
      throw new InputError(field, `must be ${zero ? "zero or more" : "above zero"}, got ${value}`);
    }
    return value;
  }

  function elementSize(data, field, dtype) {
    if (!Object.hasOwn(data.elementSize, dtype)) {
      throw new InputError(field, `unknown format “${dtype}”; known: ${Object.keys(data.elementSize).join(", ")}`);
    }
    return data.elementSize[dtype];
  }

  /** utils.roofline.peak: FLOP/s of a device in a format. */
  function peak(device, dtype, field = "rate") {
    if (!Object.hasOwn(device.peakFlops, dtype)) {
      throw new InputError(field, `${device.name} has no ${dtype} rate; it has: ${Object.keys(device.peakFlops).join(", ")}`);
    }
    return device.peakFlops[dtype];
  }

  /* ---- utils.operators: operations and bytes, exact ---- */

  function perElement(n, size, flops, inputs = 1n, outputs = 1n) {
    return { flops: flops * n, bytes: (inputs + outputs) * n * size };
  }

  /** utils.operators.causal_pairs: query-key pairs that a mask leaves, aligned bottom-right. */
  function causalPairs(queries, keys) {
    const rows = queries - (queries > keys ? queries - keys : 0n);
    const first = keys - rows + 1n;
    return (rows * (first + keys)) / 2n;
  }

  function attention(s, size) {
    if (s.heads % s.kv_heads !== 0n) {
      throw new InputError("kv_heads", `must divide the heads: ${s.heads} is no multiple of ${s.kv_heads}`);
    }
    const pairs = s.causal ? causalPairs(s.seq_len, s.kv_len) : s.seq_len * s.kv_len;
    const ends = 2n * s.batch * s.heads * s.seq_len * s.head_dim + 2n * s.batch * s.kv_heads * s.kv_len * s.head_dim;
    const scores = s.batch * s.heads * s.seq_len * s.kv_len;
    return {
      flops: s.batch * s.heads * pairs * (4n * s.head_dim + 5n),
      bytes: s.materialize ? (ends + 4n * scores) * size : ends * size + 4n * s.batch * s.heads * s.seq_len,
    };
  }

  /** The operators of utils.operators by name: sizes (BigInt by name) and bytes of an element -> cost. */
  const OPERATORS = {
    matmul: (s, e) => ({ flops: 2n * s.m * s.k * s.n, bytes: (s.m * s.k + s.k * s.n + s.m * s.n) * e }),
    attention,
    softmax: (s, e) => perElement(s.rows * s.cols, e, 4n),
    layer_norm: (s, e) => ({ flops: 7n * s.rows * s.cols, bytes: (2n * s.rows * s.cols + 2n * s.cols) * e }),
    gelu: (s, e) => perElement(s.n, e, 9n),
    relu: (s, e) => perElement(s.n, e, 1n),
    add: (s, e) => perElement(s.n, e, 1n, 2n),
    copy: (s, e) => perElement(s.n, e, 0n),
    dot_product: (s, e) => ({ flops: 2n * s.n, bytes: (2n * s.n + 1n) * e }),
    elementwise: (s, e) => perElement(s.n, e, s.flops_per_element, s.inputs, s.outputs),
  };

  const FROM_ZERO = new Set(["flops_per_element", "inputs"]);

  /** Cost {flops, bytes} of an operator of utils.operators; `sizes` holds whole numbers and, for attention, flags. */
  function operatorCost(data, name, sizes, dtype) {
    if (!Object.hasOwn(OPERATORS, name)) throw new InputError("op", `unknown operator “${name}”`);
    const exact = {};
    for (const [field, value] of Object.entries(sizes)) {
      exact[field] = typeof value === "boolean" ? value : whole(field, value, FROM_ZERO.has(field) ? 0n : 1n);
    }
    return OPERATORS[name](exact, BigInt(elementSize(data, "dtype", dtype)));
  }

  /* ---- utils.roofline ---- */

  /** utils.roofline.attainable: the lower of the two roofs at an intensity. */
  function attainable(intensity, device, rate) {
    return Math.min(peak(device, rate), positive("intensity", intensity, true) * device.memoryBandwidth);
  }

  /** Everything that utils.roofline says of a cost on a device at the rate of a format. */
  function roofline(cost, device, rate) {
    const top = peak(device, rate);
    const [flops, bytes] = [Number(cost.flops), Number(cost.bytes)];
    const [computeTime, memoryTime] = [flops / top, bytes / device.memoryBandwidth];
    const intensity = flops / bytes;
    const longer = cost.flops * BigInt(device.memoryBandwidth) > cost.bytes * BigInt(top); // exact, also at the ridge
    return {
      intensity,
      ridge: top / device.memoryBandwidth,
      attainable: attainable(intensity, device, rate),
      computeTime,
      memoryTime,
      overlapped: Math.max(computeTime, memoryTime),
      serial: computeTime + memoryTime,
      boundBy: longer ? "compute" : "memory",
    };
  }

  /** utils.roofline.crossover_batch: smallest B at which (B, d) @ (d, f) is compute-bound, or null. */
  function crossoverBatch(data, d, f, device, dtype) {
    const [dd, ff] = [whole("d", d), whole("f", f)];
    const bandwidth = BigInt(device.memoryBandwidth);
    const budget = BigInt(elementSize(data, "dtype", dtype)) * BigInt(peak(device, dtype)); // threshold x bandwidth
    const slope = 2n * dd * ff * bandwidth - budget * (dd + ff);
    return slope > 0n ? (budget * dd * ff) / slope + 1n : null;
  }

  /* ---- utils.transformer_math: memory and communication of training ---- */

  function stageOf(stage) {
    if (![0, 1, 2, 3].includes(stage)) throw new InputError("stage", `must be 0, 1, 2 or 3, got ${stage}`);
    return stage;
  }

  /** utils.transformer_math.memory_per_rank: bytes of the model's state on each rank, by component. */
  function memoryPerRank(data, parameters, ranks, stage, precision) {
    const psi = whole("parameters", parameters);
    const world = Number(whole("ranks", ranks));
    stageOf(stage);
    const kept = {};
    for (const [name, size] of Object.entries(precision)) {
      kept[name] = Number(BigInt(size) * psi) / (stage >= data.shardedFrom[name] ? world : 1);
    }
    return kept;
  }

  const total = (parts) => Object.values(parts).reduce((sum, part) => sum + part, 0);

  /** utils.transformer_math.largest_model: most parameters whose state fits. */
  function largestModel(data, memoryBytes, ranks, stage, precision) {
    return Math.floor(positive("memory", memoryBytes) / total(memoryPerRank(data, 1, ranks, stage, precision)));
  }

  /** utils.transformer_math.fewest_ranks: the fewest ranks on which the state fits, or null. */
  function fewestRanks(data, parameters, memoryBytes, stage, precision) {
    const alone = memoryPerRank(data, parameters, 1, stage, precision);
    let kept = 0;
    for (const [name, size] of Object.entries(alone)) if (stage < data.shardedFrom[name]) kept += size;
    const shared = total(alone) - kept;
    if (kept + shared <= memoryBytes) return 1;
    return kept >= memoryBytes ? null : Math.ceil(shared / (memoryBytes - kept));
  }

  const ROUNDS = { all_reduce: 2, reduce_scatter: 1, all_gather: 1 };

  /** utils.transformer_math.ring_volume: elements that each rank sends in a ring collective. */
  function ringVolume(kind, elements, ranks) {
    if (!Object.hasOwn(ROUNDS, kind)) throw new InputError("kind", `unknown collective “${kind}”`);
    const world = Number(whole("ranks", ranks));
    return (ROUNDS[kind] * Number(elements) * (world - 1)) / world;
  }

  /** Bytes/s that a rank sends over the chosen link, one direction, and who says so. */
  function sendingRate(data, values, device) {
    const link = data.links[values.link];
    if (values.link === "own") return [values.bandwidth * 1e9, "your own figure"];
    if (link.bandwidth) return [link.bandwidth, link.source];
    const both = device[link.of];
    if (!both) throw new InputError("link", `${device.name} has no ${link.name}; choose another link`);
    return [both / 2, `${device.sources[link.of]}; half of the ${MLF.units.quantity(both, "B/s")} that it adds up for both directions`];
  }

  /** utils.transformer_math.communication_volume: elements that each rank sends in a step, by collective. */
  function communicationVolume(parameters, ranks, stage) {
    const psi = whole("parameters", parameters);
    if (stageOf(stage) === 0) return { all_reduce: ringVolume("all_reduce", psi, ranks) };
    const gathers = stage === 3 ? 2 : 1;
    return {
      reduce_scatter: ringVolume("reduce_scatter", psi, ranks),
      all_gather: gathers * ringVolume("all_gather", psi, ranks),
    };
  }

  /** utils.transformer_math.tokens_to_hide: tokens a rank needs before arithmetic takes as long as communication. */
  function tokensToHide(peakFlops, bandwidth, volume, size) {
    return (volume * size * positive("rate", peakFlops)) / (6 * positive("link", bandwidth));
  }

  /** utils.transformer_math.rule_of_thumb over a rate: seconds of 6 Psi T FLOPs. */
  function arithmeticSeconds(parameters, tokens, peakFlops) {
    return Number(6n * whole("parameters", parameters) * whole("tokens", tokens)) / positive("rate", peakFlops);
  }

  /* ---- utils.transformer_math.serving_bounds ---- */

  /** ServedModel's own checks. */
  function servedModel(model) {
    const sizes = ["parameters", "multiplied", "layers", "num_heads", "kv_heads", "head_dim", "max_seq_len"];
    const exact = Object.fromEntries(sizes.map((name) => [name, whole(name, model[name])]));
    if (exact.num_heads % exact.kv_heads !== 0n) {
      throw new InputError("kv_heads", `must divide the query heads: ${exact.num_heads} is no multiple of ${exact.kv_heads}`);
    }
    if (exact.multiplied > exact.parameters) {
      throw new InputError("multiplied", `must be at most the ${exact.parameters} parameters, got ${exact.multiplied}`);
    }
    return exact;
  }

  /** ServedModel.weight_bytes. */
  const weightBytes = (data, model, dtype) => Number(model.parameters) * elementSize(data, "weights", dtype);

  /** ServedModel.kv_bytes_per_token: kappa = 2 L G D e. */
  function kvBytesPerToken(data, model, dtype) {
    return 2 * Number(model.layers) * Number(model.kv_heads) * Number(model.head_dim) * elementSize(data, "cache", dtype);
  }

  const stepSeconds = (step) => Math.max(step.readWeights, step.multiply) + step.readCaches + step.attend;

  function stepBoundBy(step) {
    const arithmetic = step.attend + (step.multiply > step.readWeights ? step.multiply : 0);
    return 2 * arithmetic > stepSeconds(step) ? "compute" : "memory";
  }

  /** decode_bounds: seconds of the parts of a decode step. `formats`: {weights, cache, arithmetic}. */
  function decodeBounds(data, model, device, batch, context, formats) {
    const rows = Number(whole("batch", batch));
    const psi = Number(model.multiplied);
    const tokens = positive("context", context, true);
    const step = {
      readWeights: (psi * elementSize(data, "weights", formats.weights)) / device.memoryBandwidth,
      multiply: (2 * psi * rows) / peak(device, formats.arithmetic, "arithmetic"),
      readCaches: (rows * tokens * kvBytesPerToken(data, model, formats.cache)) / device.memoryBandwidth,
      attend: 0,
    };
    return { ...step, seconds: stepSeconds(step), boundBy: stepBoundBy(step) };
  }

  /** prefill_bounds: the same for a prefill of `sequences` prompts of `tokens` each. */
  function prefillBounds(data, model, device, tokens, sequences, formats) {
    const [p, rows] = [Number(whole("prompt", tokens)), Number(whole("batch", sequences))];
    const step = decodeBounds(data, model, device, rows * p, 0, formats);
    const flops = (4 * Number(model.layers) * Number(model.num_heads) * Number(model.head_dim) * rows * p ** 2) / 2;
    step.attend = flops / peak(device, formats.arithmetic, "arithmetic");
    return { ...step, seconds: stepSeconds(step), boundBy: stepBoundBy(step) };
  }

  /** largest_batch: sequences of `tokens` whose caches fit beside the weights. */
  function largestBatch(data, model, memoryBytes, tokens, formats) {
    const left = positive("memory", memoryBytes) - weightBytes(data, model, formats.weights);
    return Math.max(0, Math.floor(left / (Number(whole("context", tokens)) * kvBytesPerToken(data, model, formats.cache))));
  }

  /** request_bounds: {ttft, tpot, latency, throughput}; tpot is null with a single new token. */
  function requestBounds(data, model, device, batch, prompt, fresh, formats) {
    const g = Number(whole("new", fresh));
    const ttft = prefillBounds(data, model, device, prompt, batch, formats).seconds;
    const tpot = g > 1 ? decodeBounds(data, model, device, batch, Number(prompt) + g / 2, formats).seconds : null;
    const latency = ttft + (g > 1 ? (g - 1) * tpot : 0);
    return { ttft, tpot, latency, throughput: (Number(batch) * g) / latency };
  }

  MLF.InputError = InputError;
  MLF.formulas = {
    whole, positive, elementSize, peak, causalPairs, operatorCost, OPERATORS, attainable, roofline, crossoverBatch,
    memoryPerRank, total, largestModel, fewestRanks, ringVolume, sendingRate, communicationVolume, tokensToHide,
    arithmeticSeconds, servedModel, weightBytes, kvBytesPerToken, decodeBounds, prefillBounds, largestBatch, requestBounds,
  };
})(globalThis);
