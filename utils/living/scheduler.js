/* The scheduler playground: requests of one's own under three schedulers, slots over iterations, and the paged cache beside it. */
(function (root) {
  "use strict";

  const { MLF } = root;
  const { h, s } = MLF;
  const { number } = MLF.units;

  const MOST = { requests: 8, arrival: 99, prompt: 64, answer: 64 };
  const UNLIMITED = 4096; // the token budget of lecture 11's engine: more than all requests here can bring
  const RESERVE_SHARE = 0.01; // of the pool, that an admission leaves free: solutions/lab5_serving/scheduler.py
  const REQUEST = /^(?:(\d{1,9})\s*:\s*)?(\d{1,9})\s*\+\s*(\d{1,9})$/;

  const written = (requests) => requests.map(({ arrival, prompt, answer }) => `${arrival}: ${prompt}+${answer}`).join(", ");

  /** The requests that a reader typed: "0: 4+8, 2: 1+5" is arrival, prompt and answer of each. */
  function parseRequests(text) {
    const entries = text.split(/[,;\n]/).map((entry) => entry.trim()).filter(Boolean);
    const wrong = (message) => new MLF.InputError("requests", message);
    if (!entries.length) throw wrong("Enter some requests, such as 0: 4+8, 2: 1+5.");
    if (entries.length > MOST.requests) throw wrong(`At most ${MOST.requests} requests, not ${entries.length}.`);
    return entries.map((entry, i) => {
      const found = REQUEST.exec(entry);
      if (!found) throw wrong(`Write each request as arrival: prompt + answer, such as 0: 4+8; “${entry.slice(0, 24)}” is none.`);
      const [arrival, prompt, answer] = [found[1] || "0", found[2], found[3]].map(Number);
      if (arrival > MOST.arrival) throw wrong(`R${i + 1} comes after ${number(arrival)} iterations; at most ${MOST.arrival}.`);
      for (const [name, value] of [["prompt", prompt], ["answer", answer]]) {
        if (value < 1 || value > MOST[name]) throw wrong(`The ${name} of R${i + 1} must have 1 to ${MOST[name]} tokens, not ${number(value)}.`);
      }
      return { arrival, prompt, answer };
    });
  }

  const POLICIES = { static: "static batching", continuous: "continuous batching", chunked: "chunked prefill" };
  const MEMORY = { preempt: "preempt the newest", wait: "never preempt", reserve: "reserve the answer" };
  const choices = (names) => Object.entries(names).map(([value, text]) => ({ value, text }));

  const groups = [
    {
      legend: "Scheduler",
      fields: [
        { id: "requests", label: "Requests", kind: "text", lines: 3, parse: parseRequests, wide: true, initial: "0: 4+6, 0: 4+8, 0: 2+5, 1: 4+7, 3: 8+6, 4: 2+5",
          hint: "arrival: prompt + answer, in iterations and tokens" },
        { id: "policy", label: "Policy", kind: "choice", wide: true, initial: "continuous", options: choices(POLICIES) },
        { id: "batch", label: "Maximum batch size", kind: "whole", initial: "4", least: 1, most: 8 },
        { id: "budget", label: "Token budget", kind: "whole", initial: "8", least: 1, most: 512, when: (text) => text.policy === "chunked" },
      ],
    },
    {
      legend: "KV cache",
      fields: [
        { id: "memory", label: "When blocks run out", kind: "choice", wide: true, initial: "preempt", options: choices(MEMORY), when: (text) => text.policy !== "static" },
        { id: "blocks", label: "Blocks in the pool", kind: "whole", initial: "12", least: 1, most: 40 },
        { id: "block_size", label: "Block size, in tokens", kind: "whole", initial: "4", least: 1, most: 64 },
      ],
    },
  ];

  const name = (i) => `R${i + 1}`;
  const sum = (list) => list.reduce((all, each) => all + each, 0);
  const mean = (list) => (list.length ? sum(list) / list.length : null);

  /** What lab 5's scheduler and block manager do in each iteration: Scheduler, StaticScheduler, BlockManager and Engine.step
      of solutions/lab5_serving. `memory` "wait" never preempts, "reserve" admits a request only if all can grow to their limit. */
  function compute({ requests: asked, policy, memory, batch, budget, blocks, block_size }) {
    const [slots, total, size] = [Number(batch), Number(blocks), Number(block_size)];
    const blocksFor = (tokens) => Math.ceil(tokens / size);
    const isStatic = policy === "static";
    const limit = policy === "chunked" ? Number(budget) : UNLIMITED;
    if (limit < slots) throw new MLF.InputError("budget", `Must be at least the maximum batch size, ${slots}, so that every running request advances.`);
    const requests = asked.map(({ arrival, prompt, answer }, i) => {
      const most = blocksFor(prompt + answer - 1); // the last token is never fed back
      if (most > total) {
        throw new MLF.InputError("blocks", `${name(i)} may grow to ${prompt + answer} tokens, ${most} blocks of ${size}; the pool has ${total}, so the engine refuses it.`);
      }
      return { i, arrival, prompt, answer, most, made: 0, computed: 0, reach: 0, stored: 0, table: [], seat: null, times: [], done: false };
    });
    const spare = memory === "preempt" ? Math.ceil(total * RESERVE_SHARE) : 0;
    const free = [...Array(total).keys()].reverse(); // the next to be taken is the last
    const [waiting, running, steps] = [[], [], []];
    const counted = { iterations: 0, busy: 0, computed: 0, again: 0, preemptions: 0 };
    const needed = (request) => request.prompt + request.made;
    const promised = (some) => sum(some.map(({ most }) => most));

    function release(request) {
      while (request.table.length) free.push(request.table.pop());
      running.splice(running.indexOf(request), 1);
      Object.assign(request, { computed: 0, stored: 0, seat: null });
    }

    function store(request, tokens) {
      request.stored = Math.max(request.stored, tokens);
      while (request.table.length < blocksFor(request.stored)) request.table.push(free.pop());
    }

    /** Scheduler._make_room: how many of `count` tokens have a slot; 0 if the request waits or lost its blocks. */
    function makeRoom(request, count, step) {
      while (blocksFor(request.computed + count) - request.table.length > free.length) {
        if (memory === "wait") {
          step.stalled.push(request.i);
          return 0;
        }
        const victim = running[running.length - 1];
        step.preempted.push(victim.i);
        release(victim);
        waiting.unshift(victim);
        if (victim === request) return 0;
      }
      store(request, request.computed + count);
      return count;
    }

    /** Scheduler._admit: whether the first of the waiting requests may run. */
    function admit(step) {
      const request = waiting[0];
      if (memory === "reserve" && promised([...running, request]) > total) return false;
      if (blocksFor(needed(request)) + (running.length ? spare : 0) > free.length) return false;
      running.push(waiting.shift());
      store(request, needed(request));
      step.admitted.push(request.i);
      return true;
    }

    function chunk(request, count, step) {
      if (count) step.chunks.push({ request: request.i, start: request.computed, count });
      return count;
    }

    function schedule(step) {
      if (isStatic) {
        const began = running.length > 0;
        while (!began && waiting.length && running.length < slots && promised([...running, waiting[0]]) <= total && admit(step));
        for (const request of running) chunk(request, makeRoom(request, needed(request) - request.computed, step), step);
        return waiting.length ? (began ? "batch" : running.length < slots ? "blocks" : "slots") : null;
      }
      let left = limit;
      for (const request of [...running]) {
        if (!left || !running.includes(request)) break;
        left -= chunk(request, makeRoom(request, Math.min(needed(request) - request.computed, left), step), step);
      }
      while (waiting.length && running.length < slots && left > 0 && !step.preempted.length) {
        if (!admit(step)) return "blocks";
        const request = running[running.length - 1];
        left -= chunk(request, Math.min(needed(request), left), step);
      }
      return waiting.length ? (step.preempted.length ? "preempted" : running.length >= slots ? "slots" : "budget") : null;
    }

    /** Seats, what each request does, and the cache, as they are while the iteration computes. */
    function look(step) {
      const seats = Array(slots).fill(null);
      for (const { i, seat } of running) if (seat !== null) seats[seat] = i;
      for (const request of running) if (request.seat === null) seats[(request.seat = seats.indexOf(null))] = request.i;
      const doing = new Map(step.chunks.map(({ request, start, count }) => [request, count > 1 || start < requests[request].prompt ? "prefill" : "decode"]));
      const phases = requests.map((each) => {
        if (each.done) return "done";
        if (running.includes(each)) return doing.get(each.i) || "stalled";
        return waiting.includes(each) ? "waiting" : "coming";
      });
      const held = promised(running) - sum(running.map(({ table }) => table.length));
      Object.assign(step, { seats, phases, waiting: waiting.map(({ i }) => i), running: running.map(({ i }) => i), free: free.length,
        tables: requests.map(({ table }) => [...table]), stored: requests.map(({ stored }) => stored), aside: isStatic || memory === "reserve" ? held : 0 });
    }

    function run(step) {
      counted.iterations += 1;
      counted.busy += step.chunks.length;
      counted.preemptions += step.preempted.length;
      for (const { request: i, start, count } of step.chunks) {
        const request = requests[i];
        request.computed = start + count;
        counted.computed += count;
        counted.again += Math.max(0, Math.min(request.reach, start + count) - start);
        request.reach = Math.max(request.reach, start + count);
        if (request.computed < needed(request)) continue;
        request.made += 1;
        request.times.push(step.iteration);
        if (request.made < request.answer) continue;
        request.done = true;
        step.finished.push(i);
        release(request);
      }
    }

    let isStuck = false;
    for (let k = 0; !isStuck && requests.some(({ done }) => !done); k += 1) {
      const step = { iteration: k + 1, chunks: [], admitted: [], preempted: [], stalled: [], finished: [], why: null };
      for (const request of requests) if (request.arrival <= k && !request.came) (request.came = true), waiting.push(request);
      const hasWork = waiting.length + running.length > 0;
      if (hasWork) step.why = schedule(step);
      isStuck = hasWork && !step.chunks.length;
      look(step);
      if (hasWork && !isStuck) run(step);
      const some = requests.filter(({ times }) => times.length);
      const long = some.filter(({ times }) => times.length > 1);
      Object.assign(step, counted, {
        made: requests.map(({ made }) => made),
        ttft: mean(some.map(({ times, arrival }) => times[0] - arrival)),
        tpot: mean(long.map(({ times }) => (times[times.length - 1] - times[0]) / (times.length - 1))),
      });
      steps.push(step);
    }
    return { steps, isStuck, size, total, slots };
  }

  /* ---- what is said ---- */

  const list = (indices) => {
    const names = indices.map(name);
    return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}` : names.join("");
  };
  const are = (some, one, more) => `${list(some)} ${some.length > 1 ? more : one}`;
  const WHY = {
    slots: "all slots are taken",
    batch: "the batch runs until its last request is finished",
    blocks: "too few blocks are free",
    preempted: "no block is free",
    budget: "the token budget is spent",
  };

  function words({ requests, memory, policy }, { steps, isStuck }, at) {
    const counted = (what) => requests.map((_, i) => i).filter(what);
    if (!at) {
      const there = counted((i) => !requests[i].arrival);
      return `Nothing is computed yet. ${there.length ? `${are(there, "waits", "wait")}.` : "Nobody waits."}`;
    }
    const { iteration, chunks, admitted, preempted, stalled, finished, waiting, why } = steps[at - 1];
    if (isStuck && at === steps.length) {
      return `Iteration ${iteration} can compute nothing: deadlock. Each of ${list(stalled)} waits for a block that another one holds.`;
    }
    const said = [];
    const reads = counted((i) => steps[at - 1].phases[i] === "prefill");
    const decodes = chunks.map(({ request }) => request).filter((i) => !reads.includes(i));
    const tokens = sum(chunks.map(({ count }) => count));
    if (!chunks.length) said.push("has nothing to do");
    else said.push(`computes ${tokens} token${tokens > 1 ? "s" : ""}: ${[reads.length && `${list(reads)} prefill`, decodes.length && `${list(decodes)} decode`].filter(Boolean).join(", ")}`);
    const sentences = [`Iteration ${iteration} ${said.join("")}.`];
    if (preempted.length) sentences.push(`No block is free, so ${are(preempted, "is preempted, the newest: its blocks are taken, and its tokens", "are preempted, the newest: their blocks are taken, and their tokens")} will be computed again.`);
    if (stalled.length) sentences.push(`${are(stalled, "stands", "stand")} still: no block is free for the next token.`);
    const joins = policy !== "static" || admitted.length ? admitted.filter((i) => at > 1 || requests[i].arrival) : [];
    if (joins.length) sentences.push(`${are(joins, "joins", "join")}.`);
    if (finished.length) sentences.push(`${are(finished, "is", "are")} finished.`);
    if (waiting.length) sentences.push(`${are(waiting, "waits", "wait")}: ${memory === "reserve" && why === "blocks" ? "room for the whole answer is not free" : WHY[why]}.`);
    return sentences.join(" ");
  }

  /* ---- what is drawn ---- */

  const [LABEL, HEAD, SLOT, LANE, GAP] = [46, 26, 27, 38, 26]; // pixels
  const COLUMNS = [30, 24, 18];
  const SCALES = [16, 24, 32, 48, 64, 96, 128]; // tokens across
  const WIDE = 560; // from here on the cache stands beside the slots

  const rect = (className, x, y, width, height, title) =>
    s("rect", { class: className, x, y, width: Math.max(0, width), height: Math.max(0, height) }, title ? s("title", {}, title) : null);
  const text = (className, x, y, content, anchor) => s("text", { class: className, x, y, "text-anchor": anchor }, content);
  const head = (x, y, content) => text("mlf-label mlf-strong", x, y, content);

  const kindOf = (step, i) => (step.finished.includes(i) && step.phases[i] === "decode" ? "last" : step.phases[i]);

  class Cells {
    /** Boxes of a kind, in one path: a frame draws hundreds of them. */
    constructor() {
      this.of = new Map();
    }

    add(kind, x, y, width, height) {
      this.of.set(kind, `${this.of.get(kind) || ""}M${x} ${y}h${width}v${height}h${-width}z`);
    }

    paths() {
      const order = [...this.of.keys()].sort((a, b) => (a === "last") - (b === "last"));
      return order.map((kind) => s("path", { class: `mlf-${kind}-cell${["idle", "waiting", "stalled"].includes(kind) ? " mlf-hatched" : ""}`, d: this.of.get(kind) }));
    }
  }

  class Board {
    /** One drawing of the playground at `step`: slots, requests, pool and block tables. */
    constructor(width, { values, results, step, act }, drawing) {
      Object.assign(this, { width, values, results, step, act, drawing });
      this.now = step ? results.steps[step - 1] : null;
      this.isWide = width >= WIDE;
      this.side = this.isWide ? Math.min(300, Math.max(216, width * 0.36)) : width;
      this.left = this.isWide ? width - this.side - 32 : width;
      const held = drawing.held; // while a handle is dragged the scales stay, so that it stays under the pointer
      const wanted = Math.max(12, results.steps.length + 2);
      const room = this.left - LABEL;
      this.column = held?.column || COLUMNS.find((each) => each * wanted <= room) || COLUMNS[COLUMNS.length - 1];
      this.shown = Math.floor(room / this.column);
      this.from = held?.from ?? Math.max(0, Math.min(wanted - this.shown, step - Math.ceil(this.shown * 0.75)));
      const longest = 1.2 * Math.max(...values.requests.map(({ prompt, answer }) => prompt + answer));
      this.scale = held?.scale || SCALES.find((each) => each >= longest) || SCALES[SCALES.length - 1];
      drawing.board = this;
      this.hatch = `mlf-hatch-${(MLF.hatched = (MLF.hatched || 0) + 1)}`; // a page may hold several of these figures
    }

    x(iteration) {
      return LABEL + (iteration - this.from) * this.column;
    }

    paint() {
      const { isWide, values, results, width } = this;
      const slots = this.slots(0);
      const pool = this.pool(isWide ? width - this.side : 0, isWide ? 0 : null);
      const below = isWide ? Math.max(slots.end, pool.end) + GAP : slots.end + GAP;
      const lanes = this.lanes(below);
      const moved = isWide ? 0 : lanes.end + GAP;
      const tables = this.tables(isWide ? width - this.side : 0, isWide ? below : moved + pool.end + GAP);
      const height = Math.max(lanes.end, tables.end) + 6;
      pool.group.setAttribute("transform", `translate(0 ${moved})`);
      const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
        "aria-label": `${values.batch} slots, ${values.blocks} blocks of ${values.block_size} tokens. ${words(values, results, this.step)}` },
      s("defs", {}, s("pattern", { id: this.hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        s("rect", { class: "mlf-hatch-ground", width: 6, height: 6 }), s("line", { class: "mlf-hatch-line", x1: 0, x2: 0, y1: 0, y2: 6 }))),
      this.frame(HEAD, lanes.end), slots.group, pool.group, lanes.group, tables.group);
      for (const each of svg.querySelectorAll(".mlf-hatched")) each.setAttribute("fill", `url(#${this.hatch})`);
      return svg;
    }

    /** The iteration that is shown now, as a band behind slots and requests. */
    frame(top, bottom) {
      return this.now ? rect("mlf-iteration", this.x(this.step - 1), top - 4, this.column, bottom - top + 4) : null;
    }

    /** Calls draw(step, x) for the iterations that are over and in view. */
    over(draw) {
      this.results.steps.slice(this.from, Math.min(this.step, this.from + this.shown)).forEach((step) => draw(step, this.x(step.iteration - 1)));
    }

    slots(top) {
      const group = s("g", {}, head(0, top + 13, "Slots"));
      const [cells, names, rows, begin] = [new Cells(), [], this.results.slots, top + HEAD];
      for (let k = this.from; k < this.from + this.shown; k += 1) {
        const every = this.column >= 30 ? 1 : this.column >= 24 ? 2 : 3;
        const isNear = every > 1 && Math.abs(k + 1 - this.step) === 1; // its number would touch that of the present iteration
        if (((k + 1) % every === 0 && !isNear) || k === this.step - 1) group.append(text(k === this.step - 1 ? "mlf-strong" : "", this.x(k + 0.5), top + 13, `${k + 1}`, "middle"));
      }
      for (let slot = 0; slot < rows; slot += 1) {
        const y = begin + slot * SLOT;
        group.append(text("", 0, y + 17, `slot ${slot + 1}`));
        this.over((step, x) => {
          const i = step.seats[slot];
          const kind = i === null ? "idle" : kindOf(step, i);
          cells.add(kind, x + 1, y, this.column - 2, SLOT - 4);
          if (kind === "prefill" && step.finished.includes(i)) cells.add("last", x + 1, y + SLOT - 9, this.column - 2, 5);
          if (i !== null) names.push(text(kind === "prefill" ? "mlf-inside" : `mlf-on-${kind}`, x + this.column / 2, y + 16, this.column < 22 ? `${i + 1}` : name(i), "middle"));
        });
      }
      group.append(...cells.paths(), ...names);
      return { group, end: begin + rows * SLOT };
    }

    lanes(top) {
      const { drawing, values: { requests }, act } = this;
      const group = s("g", {}, head(0, top + 13, "Requests: drag their arrival"));
      const [cells, right, knobs] = [new Cells(), LABEL + this.shown * this.column, []];
      requests.forEach((request, i) => {
        const y = top + HEAD + i * LANE + LANE / 2;
        const x = Math.max(LABEL, Math.min(right, this.x(request.arrival)));
        group.append(text("mlf-label", 0, y + 4, name(i)), s("line", { class: "mlf-gridline", x1: LABEL, x2: right, y1: y, y2: y }));
        this.over((step, left) => {
          const kind = kindOf(step, i);
          if (kind === "waiting") cells.add(kind, left, y - 4, this.column, 8);
          else if (kind !== "coming" && kind !== "done") cells.add(kind, left + 0.5, y - 7, this.column - 1, 14);
          if (step.preempted.includes(i)) knobs.push(s("path", { class: "mlf-preempted", d: `M${left - 5} ${y - 5}l10 10m0 -10l-10 10` }, s("title", {}, `${name(i)} is preempted`)));
        });
        knobs.push(MLF.handle(drawing, `arrival-${i}`, {
          x, y, room: 28, value: request.arrival, least: 0, most: MOST.arrival, step: 1, label: `${name(i)}: arrival`,
          text: request.arrival ? `after iteration ${request.arrival}` : "at the start", at: (pixel) => this.from + (pixel - LABEL) / this.column,
          children: [s("path", { class: "mlf-knob", d: `M${x - 6} ${y - 8}L${x + 7} ${y}L${x - 6} ${y + 8}z` })],
          change: (value) => act.set("requests", written(requests.map((each, k) => (k === i ? { ...each, arrival: drawing.held ? Math.min(value, this.from + this.shown) : value } : each)))),
        }));
      });
      group.append(...cells.paths(), ...knobs);
      return { group, end: top + HEAD + requests.length * LANE };
    }

    pool(x, top) {
      const { results: { total, size }, now, side } = this;
      const y = top || 0;
      const group = s("g", {}, head(x, y + 13, "Pool of blocks"));
      const across = total > 20 ? 8 : total > 10 ? 6 : 5;
      const [w, tall] = [(side + 5) / across - 5, 38];
      const owners = new Map();
      if (now) now.tables.forEach((table, i) => table.forEach((block, k) => owners.set(block, { i, used: Math.min(size, now.stored[i] - k * size) })));
      let aside = now ? now.aside : 0;
      for (let block = total - 1; block >= 0; block -= 1) {
        const [left, above] = [x + (block % across) * (w + 5), y + HEAD + Math.floor(block / across) * (tall + 5)];
        const owner = owners.get(block);
        const isAside = !owner && aside > 0;
        if (isAside) aside -= 1;
        const said = owner ? `block ${block}: ${name(owner.i)}, ${owner.used} of ${size} slots used` : `block ${block}: ${isAside ? "set aside" : "free"}`;
        group.append(rect(isAside ? "mlf-aside-block mlf-hatched" : owner ? "mlf-held-block mlf-hatched" : "mlf-free-block", left, above, w, tall, said));
        if (owner) {
          group.append(rect(`mlf-owner-${owner.i % 2}`, left, above, (w * owner.used) / size, tall, said));
          group.append(text("mlf-strong mlf-plain", left + w / 2, above + 31, name(owner.i), "middle"));
        }
        group.append(text(owner ? "mlf-number mlf-plain" : "mlf-number", left + w / 2, above + 14, `${block}`, "middle"));
      }
      return { group, end: y + HEAD + Math.ceil(total / across) * (tall + 5) };
    }

    tables(x, top) {
      const { values: { requests }, results: { size }, now, side } = this;
      const group = s("g", {}, head(x, top + 13, this.isWide ? "Block tables: drag the lengths" : "Block tables: drag prompt and answer"));
      const begin = this.isWide ? x : x + 30;
      const unit = (side - (begin - x) - 14) / this.scale;
      requests.forEach(({ prompt, answer }, i) => {
        const y = top + HEAD + i * LANE + LANE / 2;
        const [stored, table] = now ? [now.stored[i], now.tables[i]] : [0, []];
        const px = (tokens) => begin + tokens * unit;
        if (!this.isWide) group.append(text("mlf-label", x, y + 4, name(i)));
        group.append(rect("mlf-to-come", begin, y - 9, (prompt + answer) * unit, 18));
        table.forEach((block, k) => group.append(rect("mlf-hatched mlf-held-block", px(k * size), y - 9, size * unit, 18)));
        group.append(rect("mlf-owner-0", begin, y - 9, Math.min(stored, prompt) * unit, 18, `${name(i)}: ${stored} of ${prompt + answer} tokens have keys and values`),
          rect("mlf-owner-1", px(prompt), y - 9, (stored - prompt) * unit, 18));
        table.forEach((block, k) => group.append(rect("mlf-block-edge", px(k * size), y - 9, size * unit, 18),
          size * unit > 8 * String(block).length + 7 ? text("mlf-number mlf-plain", px(k * size) + 6, y + 4.5, `${block}`) : null));
        group.append(
          this.length(`prompt-${i}`, `${name(i)}: prompt`, px(prompt), y, prompt, MOST.prompt, (pixel) => (pixel - begin) / unit, (to) => ({ prompt: to })),
          this.length(`answer-${i}`, `${name(i)}: answer`, px(prompt + answer), y, answer, MOST.answer, (pixel) => (pixel - begin) / unit - prompt, (to) => ({ answer: to })));
      });
      return { group, end: top + HEAD + requests.length * LANE };
    }

    length(key, name, x, y, value, most, at, changed) {
      const { drawing, act, values: { requests } } = this;
      return MLF.handle(drawing, key, {
        x, y, room: 20, value, least: 1, most, step: 1, label: name, text: `${value} token${value > 1 ? "s" : ""}`, at,
        children: [s("rect", { class: "mlf-knob", x: x - 3.5, y: y - 12, width: 7, height: 24, rx: 3 })],
        change: (to) => {
          const edited = requests.map((each, k) => (key.endsWith(`-${k}`) ? { ...each, ...changed(to) } : each));
          if (!drawing.held || edited.every(({ prompt, answer }) => prompt + answer <= this.scale)) act.set("requests", written(edited));
        },
      });
    }
  }

  const paint = (width, view, drawing) => new Board(width, view, drawing).paint();

  const LEGEND = [["prefill", "prefill"], ["decode", "decode"], ["last", "last token"], ["idle", "idle, waiting or empty"], ["stalled", "waits for a block"],
    ["owner-0", "block in use"], ["aside", "set aside"]];

  function verdict({ requests }, { steps, isStuck, total }, at) {
    if (!isStuck || at < steps.length) return "";
    const { stalled, iteration, tables, waiting } = steps[at - 1];
    const held = sum(stalled.map((i) => tables[i].length));
    return `Deadlock after iteration ${iteration - 1}. ${list(stalled)} hold ${held === total ? `all ${total}` : `${held} of the ${total}`} blocks and cannot go on without another. ` +
      `None of them can end, so none gives a block back${waiting.length ? `, and ${list(waiting)} cannot start` : ""}. Preempt the newest, or reserve room for prompt and answer, and every request is answered.`;
  }

  function build(host, act) {
    const caption = h("figcaption", {}, "");
    const legend = h("p", { class: "mlf-legend" }, LEGEND.map(([kind, said]) => h("span", {}, h("span", { class: `mlf-swatch mlf-${kind}-swatch` }), said)));
    const figure = h("figure", {}, caption, legend);
    const drawing = new MLF.Drawing(figure, paint);
    drawing.host.addEventListener("pointerdown", (event) => {
      if (event.target.closest(".mlf-handle")) drawing.held = drawing.board;
    });
    for (const end of ["pointerup", "pointercancel"]) {
      root.addEventListener(end, () => {
        if (!drawing.held) return;
        drawing.held = null;
        drawing.redraw();
      });
    }
    const deadlock = h("p", { class: "mlf-verdict mlf-deadlock", role: "status" });
    const facts = h("dl", { class: "mlf-facts simple" });
    let shown = null;
    const change = (edit) => act.set("requests", written(edit(shown.requests)));
    const more = h("button", { type: "button", onclick: () => change((all) => [...all, { ...all[all.length - 1] }]) }, "Add a request");
    const fewer = h("button", { type: "button", onclick: () => change((all) => all.slice(0, -1)) }, "Remove the last");
    host.append(figure, act.player, h("p", { class: "mlf-actions" }, more, fewer), deadlock, facts);
    return (values, results, step) => {
      shown = values;
      more.disabled = values.requests.length >= MOST.requests;
      fewer.disabled = values.requests.length <= 1;
      caption.textContent = `${POLICIES[values.policy][0].toUpperCase()}${POLICIES[values.policy].slice(1)}, iteration by iteration`;
      drawing.update({ values, results, step, act });
      const said = verdict(values, results, step);
      if (deadlock.textContent !== said) deadlock.textContent = said;
      deadlock.hidden = !said;
      facts.replaceChildren(...MLF.facts(figures(values, results, step)));
      return words(values, results, step);
    };
  }

  /** The totals up to this step. */
  function figures({ requests }, { steps, slots, size, total }, at) {
    const now = at ? steps[at - 1] : { iterations: 0, busy: 0, ttft: null, tpot: null, preemptions: 0, again: 0, free: total, stored: [0], aside: 0, phases: [], finished: [] };
    const span = now.iterations * slots;
    const answered = at ? requests.filter((_, i) => now.made[i] >= requests[i].answer).length : 0;
    const used = sum(now.stored);
    const empty = (total - now.free) * size - used;
    const average = (value) => (value === null ? "–" : `${number(value, 3)} iteration${value === 1 ? "" : "s"}`);
    const rest = [[empty, "empty in blocks"], [now.aside * size, "set aside"], [(now.free - now.aside) * size, "free"]];
    return [
      ["Iterations", number(now.iterations), `${answered} of ${requests.length} requests answered`],
      ["Slots in use", span ? `${number((100 * now.busy) / span, 3)} %` : "–", `${now.busy} of ${span} slots over iterations`],
      ["Mean TTFT", average(now.ttft), "from arrival to first token"],
      ["Mean TPOT", average(now.tpot), "for each token after the first"],
      ["KV slots in use", `${used} of ${total * size}`, rest.filter(([count]) => count).map(([count, said]) => `${number(count)} ${said}`).join(", ") || "none is empty"],
      ["Preemptions", number(now.preemptions), `${now.again} token${now.again === 1 ? "" : "s"} computed again`],
    ];
  }

  MLF.start({ name: "scheduler", title: "Scheduler playground", groups, compute, build, steps: (_, { steps }) => steps.length, begin: Infinity });
})(globalThis);
