/* Parallel training in time, as utils has it: pipeline schedules and their simulation (utils.schedules), the all-reduces of
   data parallelism (utils.transformer_math.overlap), and the chunks of one ring. Pure: no document, no state. */
(function (root) {
  "use strict";

  const MLF = (root.MLF = root.MLF || {});
  const { InputError } = MLF;
  const { ringVolume } = MLF.formulas;
  const range = (count) => Array.from({ length: count }, (_, i) => i);

  /* ---- utils.transformer_math: the ring ---- */

  /** ring_seconds: seconds of a ring collective. */
  function ringSeconds(kind, bytes, ranks, bandwidth, latency) {
    const steps = (kind === "all_reduce" ? 2 : 1) * (ranks - 1);
    return ringVolume(kind, bytes, ranks) / bandwidth + steps * latency;
  }

  /** data_parallel_step: forward and backward pass of a rank, and the all-reduces of its buckets. */
  function dataParallelStep(parameters, ranks, buckets, tokens, given) {
    const { peakFlops, bandwidth, latency, elementSize, overlap } = given;
    const [forward, backward] = [(2 * parameters * tokens) / peakFlops, (4 * parameters * tokens) / peakFlops];
    const arithmetic = forward + backward;
    const each = ringSeconds("all_reduce", (elementSize * parameters) / buckets, ranks, bandwidth, latency);
    let [free, communication] = [0, 0];
    const times = range(buckets).map((k) => {
      const ready = forward + (backward * (k + 1)) / buckets;
      const start = Math.max(free, overlap ? ready : arithmetic);
      free = start + each;
      communication += each;
      return { ready, start, end: free };
    });
    const seconds = Math.max(arithmetic, free);
    const exposed = seconds - arithmetic;
    return { forward, backward, arithmetic, buckets: times, each, communication, seconds, exposed, hidden: communication - exposed };
  }

  /** A ring all-reduce of one tensor in N chunks, as lecture 08 writes it: after each of its 2 (N - 1) steps, which ranks' data
      each chunk of each rank holds (states[step][rank][chunk], a set as bits), and what was sent in the step. */
  function ringStates(ranks) {
    const mod = (value) => ((value % ranks) + ranks) % ranks;
    let state = range(ranks).map((rank) => range(ranks).map(() => 1 << rank));
    const [states, sent] = [[state], []];
    for (let step = 0; step < 2 * (ranks - 1); step += 1) {
      const gather = step >= ranks - 1;
      const chunkOf = (rank) => (gather ? mod(rank - (step - ranks + 1)) : mod(rank - step - 1));
      const moves = range(ranks).map((rank) => ({ source: rank, target: mod(rank + 1), chunk: chunkOf(rank) }));
      const next = state.map((row) => [...row]);
      for (const { source, target, chunk } of moves) next[target][chunk] = state[source][chunk] | (gather ? 0 : state[target][chunk]);
      state = next;
      states.push(state);
      sent.push(moves);
    }
    return { states, sent };
  }

  /* ---- utils.schedules: an action is {kind, micro, chunk} ---- */

  const action = (kind, micro, chunk = 0) => ({ kind, micro, chunk });
  const run = (kind, micros) => range(micros).map((i) => action(kind, i));

  /** utils.schedules.orders._alternate. */
  function alternate(forward, backward, warmUp) {
    const ahead = Math.min(warmUp, forward.length);
    const order = forward.slice(0, ahead);
    for (let i = ahead; i < forward.length; i += 1) order.push(forward[i], backward[i - ahead]);
    return [...order, ...backward.slice(forward.length - ahead)];
  }

  function interleavedOrders(p, m, chunks) {
    if (m % p) throw new InputError("micro", `must be a multiple of the ${p} stages, got ${m}`);
    const turns = range(m / p).flatMap((round) => range(chunks).flatMap((chunk) => range(p).map((i) => [round * p + i, chunk])));
    const forward = turns.map(([i, chunk]) => action("F", i, chunk));
    const backward = turns.map(([i, chunk]) => action("B", i, chunks - 1 - chunk));
    return range(p).map((stage) => alternate(forward, backward, (chunks - 1) * p + 2 * (p - stage - 1)));
  }

  function zeroBubbleOrder(p, m, stage, more) {
    const [ahead, lag] = more ? [2 * (p - stage) - 2, 2 * stage] : [p - stage - 1, stage];
    const forward = run("F", m);
    const order = forward.splice(0, ahead + 1);
    for (let i = 0; i < m; i += 1) {
      order.push(action("B", i));
      if (i >= lag) order.push(action("W", i - lag));
      order.push(...forward.splice(0, 1));
    }
    return [...order, ...run("W", m).slice(Math.max(0, m - lag))];
  }

  /** The schedules of utils.schedules: (stages, micro-batches, chunks) -> for each stage its actions in order. */
  const ORDERS = {
    naive: (p, m) => range(p).map(() => range(m).flatMap((i) => [action("F", i), action("B", i)])),
    gpipe: (p, m) => range(p).map(() => [...run("F", m), ...run("B", m)]),
    one_f_one_b: (p, m) => range(p).map((stage) => alternate(run("F", m), run("B", m), p - stage - 1)),
    interleaved: interleavedOrders,
    zero_bubble: (p, m) => range(p).map((stage) => zeroBubbleOrder(p, m, stage, false)),
    zero_bubble_2: (p, m) => range(p).map((stage) => zeroBubbleOrder(p, m, stage, true)),
  };

  const KINDS = { F: 0, B: 1, W: 2 };

  /** Schedule.needs: what must be done before an action of a stage, as [stage, kind, micro, chunk]. */
  function needs(p, chunks, stage, { kind, micro, chunk }) {
    if (kind === "W") return [[stage, "B", micro, chunk]];
    if (kind === "F") return stage ? [[stage - 1, "F", micro, chunk]] : chunk ? [[p - 1, "F", micro, chunk - 1]] : [];
    const own = [[stage, "F", micro, chunk]];
    if (stage < p - 1) return [...own, [stage + 1, "B", micro, chunk]];
    return chunk < chunks - 1 ? [...own, [0, "B", micro, chunk + 1]] : own;
  }

  /** utils.schedules.simulate: when each action starts and ends, each as soon as what it needs is there. `forward` and `backward`
      hold one time for each stage; a chunk takes 1/v of them, and "W", where it is apart, half of the backward pass. */
  function simulate(orders, micros, chunks, forward, backward) {
    const p = orders.length;
    const split = orders.some((order) => order.some(({ kind }) => kind === "W"));
    const seconds = { F: forward.map((t) => t / chunks), B: backward.map((t) => (split ? t / chunks - t / chunks / 2 : t / chunks)), W: backward.map((t) => t / chunks / 2) };
    const place = (stage, kind, micro, chunk) => ((stage * 3 + KINDS[kind]) * chunks + chunk) * micros + micro;
    const done = new Float64Array(p * 3 * chunks * micros).fill(-1);
    const [free, next, work] = [new Float64Array(p), new Int32Array(p), []];
    const awaited = new Map();
    const ready = range(p);
    while (ready.length) {
      const stage = ready.pop();
      while (next[stage] < orders[stage].length) {
        const now = orders[stage][next[stage]];
        let [start, missing] = [free[stage], -1];
        for (const need of needs(p, chunks, stage, now)) {
          const at = place(...need);
          if (done[at] < 0) missing = at;
          start = Math.max(start, done[at]);
        }
        if (missing >= 0) {
          awaited.set(missing, [...(awaited.get(missing) || []), stage]);
          break;
        }
        const [at, end] = [place(stage, now.kind, now.micro, now.chunk), start + seconds[now.kind][stage]];
        free[stage] = done[at] = end;
        work.push({ stage, ...now, start, end });
        next[stage] += 1;
        ready.push(...(awaited.get(at) || []));
        awaited.delete(at);
      }
    }
    return work.sort((a, b) => a.start - b.start || a.stage - b.stage || a.end - b.end);
  }

  /** What utils.schedules.Timeline says of simulated work. */
  function timeline(orders, micros, chunks, work) {
    const p = orders.length;
    const makespan = Math.max(...work.map((each) => each.end));
    const own = range(p).map((stage) => work.filter((each) => each.stage === stage));
    const busy = own.map((each) => each.reduce((sum, { start, end }) => sum + (end - start), 0));
    const all = busy.reduce((sum, each) => sum + each, 0);
    const last = orders[0].some(({ kind }) => kind === "W") ? "W" : "B";
    const peaks = orders.map((order) => {
      let [held, most] = [0, 0];
      for (const { kind } of order) {
        held += Number(kind === "F") - Number(kind === last);
        most = Math.max(most, held);
      }
      return most;
    });
    return {
      makespan, busy, peaks,
      bubble: (p * makespan) / all - 1,
      idleFraction: 1 - all / (p * makespan),
      ownBubble: Math.max(...own.map((each, stage) => (each.at(-1).end - each[0].start) / busy[stage])) - 1,
    };
  }

  MLF.schedules = { ringSeconds, dataParallelStep, ringStates, ORDERS, simulate, timeline };
})(globalThis);
