/* The training explorer: what each rank keeps and sends at the four stages of ZeRO. */
(function (root) {
  "use strict";

  const { MLF, MLF_DATA: data } = root;
  const { h } = MLF;
  const F = MLF.formulas;
  const { number, quantity, many } = MLF.units;

  const entries = Object.entries;
  const OWN = "own";
  const STAGES = [0, 1, 2, 3];
  const nameOf = (stage) => (stage ? `ZeRO-${stage}` : "DDP");
  const gpus = entries(data.devices).filter(([, device]) => device.kind === "GPU");
  const rates = [...new Set(gpus.flatMap(([, device]) => Object.keys(device.peakFlops)))];
  const choice = (value, text) => ({ value, text });

  const groups = [
    {
      legend: "Model",
      fields: [
        { id: "model", label: "Model", kind: "choice", initial: OWN,
          options: [choice(OWN, "of my own size"), ...entries(data.models).map(([name, model]) => choice(name, `${name}: ${many(model.parameters)}`))] },
        { id: "psi", label: "Parameters Ψ", kind: "whole", initial: "7.5e9", least: 1, most: 1e14, when: (text) => text.model === OWN },
        { id: "stage", label: "Stage of ZeRO", kind: "choice", initial: "3", options: STAGES.map((stage) => choice(String(stage), data.stages[stage])) },
        { id: "recipe", label: "Precision", kind: "choice", initial: "mixed_adam", wide: true,
          options: entries(data.precisions).map(([id, precision]) => choice(id, precision.label)) },
      ],
    },
    {
      legend: "Machines",
      fields: [
        { id: "gpu", label: "GPU", kind: "choice", initial: "H100", options: gpus.map(([value, device]) => choice(value, device.label)) },
        { id: "ranks", label: "Ranks N", kind: "whole", initial: "64", least: 1, most: 1e6 },
        { id: "reserve", label: "Set aside", unit: "GB", kind: "number", initial: "0", least: 0, most: 1e6, hint: "on each, for activations" },
      ],
    },
    {
      legend: "Communication",
      fields: [
        { id: "link", label: "Link", kind: "choice", initial: "nvlink", options: entries(data.links).map(([id, link]) => choice(id, link.label)) },
        { id: "bandwidth", label: "Each rank sends at", unit: "GB/s", kind: "number", initial: "100", least: 0.001, most: 1e6, when: (text) => text.link === OWN },
        { id: "sent", label: "Sent as", kind: "choice", initial: "bf16", options: entries(data.elementSize).map(([name, size]) => choice(name, `${name}, ${size} B`)) },
        { id: "tokens", label: "Tokens per step", kind: "whole", initial: "8192", least: 1, most: 1e12, hint: "on each rank" },
        { id: "rate", label: "Arithmetic in", kind: "choice", initial: "bf16", options: rates.map((value) => choice(value, value)) },
      ],
    },
  ];

  function stageOf(stage, psi, values, given) {
    const { precision, room, bandwidth, size, peak } = given;
    const kept = F.memoryPerRank(data, psi, values.ranks, stage, precision);
    const elements = F.communicationVolume(psi, values.ranks, stage);
    const volume = F.total(elements);
    return {
      stage, kept, elements, volume,
      total: F.total(kept),
      fits: F.total(kept) <= room,
      fewest: F.fewestRanks(data, psi, room, stage, precision),
      largest: F.largestModel(data, room, values.ranks, stage, precision),
      sentBytes: volume * size,
      sendSeconds: (volume * size) / bandwidth,
      tokensToHide: F.tokensToHide(peak, bandwidth, volume / Number(psi), size),
    };
  }

  function compute(values) {
    const device = data.devices[values.gpu];
    const psi = values.model === OWN ? values.psi : BigInt(data.models[values.model].parameters);
    const room = device.memoryBytes - values.reserve * 1e9;
    if (!(room > 0)) throw new MLF.InputError("reserve", `must be less than the ${quantity(device.memoryBytes, "B")} of a ${device.name}`);
    const [bandwidth, linkSource] = F.sendingRate(data, values, device);
    const size = F.elementSize(data, "sent", values.sent);
    const peak = F.peak(device, values.rate);
    const given = { precision: data.precisions[values.recipe].bytes, room, bandwidth, size, peak };
    return {
      ...given, device, psi, linkSource,
      stages: STAGES.map((stage) => stageOf(stage, psi, values, given)),
      stepSeconds: F.arithmeticSeconds(psi, values.tokens, peak),
      passByPass: F.tokensToHide(peak, bandwidth, (3 * (Number(values.ranks) - 1)) / Number(values.ranks), size),
    };
  }

  /* ---- what is shown ---- */

  const collectives = (stage) => Object.keys(stage.elements).join(" and ").replaceAll("_", "-");
  const count = (ranks) => (ranks === null ? "no number" : number(BigInt(ranks)));

  function verdict(found, chosen, values) {
    const kept = `${quantity(chosen.total, "B", 4)} on each of ${number(values.ranks)} ${found.device.name}s`;
    if (chosen.fits) return [`${nameOf(chosen.stage)} fits: ${kept}.`, ` ${quantity(found.room - chosen.total, "B", 3)} are left of ${quantity(found.room, "B", 4)}, activations aside.`];
    const more = chosen.fewest === null ? "No number of ranks changes that; a higher stage may." : `It takes at least ${count(chosen.fewest)} ranks.`;
    return [`${nameOf(chosen.stage)} does not fit: ${kept}, of ${quantity(found.room, "B", 4)}.`, ` ${more}`];
  }

  function figures(found, chosen, values) {
    const share = chosen.sendSeconds / found.stepSeconds;
    return [
      ["State of the model", quantity(F.total(found.precision) * Number(found.psi), "B", 4), `${F.total(found.precision)} B for each of ${many(Number(found.psi))} parameters`],
      ["On each rank", quantity(chosen.total, "B", 4), `${number(chosen.total / Number(found.psi), 4)} B a parameter`],
      ["Fewest ranks", count(chosen.fewest), `${nameOf(chosen.stage)}, state alone`],
      ["Largest model", many(chosen.largest), `parameters, on ${number(values.ranks)} ranks`],
      ["Each rank sends", quantity(chosen.sentBytes, "B", 4), `in a step: ${number(chosen.volume / Number(found.psi), 4)} Ψ elements, by ${collectives(chosen)}`],
      ["That takes", quantity(chosen.sendSeconds, "s", 4), `at ${quantity(found.bandwidth, "B/s", 4)}, latency aside`],
      ["Arithmetic of a step", quantity(found.stepSeconds, "s", 4), `6 Ψ T at the ${values.rate} peak`],
      ["Sending over arithmetic", number(share, 3), share <= 1 ? "less than one: it can hide" : "more than one: the links rule"],
      ["Tokens to hide it", number(chosen.tokensToHide, 4), `a rank, behind the whole step; pass by pass ${number(found.passByPass, 4)}`],
    ];
  }

  function tables(found, values) {
    const parts = Object.keys(found.precision);
    const chosen = Number(values.stage);
    const kept = found.stages.map((each) => [nameOf(each.stage), ...parts.map((part) => quantity(each.kept[part], "B", 3)), quantity(each.total, "B", 4), each.fits ? "yes" : "no"]);
    const sent = found.stages.map((each) => [nameOf(each.stage), count(each.fewest), quantity(each.sentBytes, "B", 4),
      quantity(each.sendSeconds, "s", 4), number(each.tokensToHide, 4)]);
    return [
      MLF.table("Bytes on each rank, by component", ["stage", ...parts, "sum", "fits"], kept, chosen),
      MLF.table("What it takes, and what each rank sends in a step", ["stage", "fewest ranks", "sent", "time to send", "tokens to hide"], sent, chosen),
    ];
  }

  function picture(found, values) {
    const bars = found.stages.map((each) => ({
      name: nameOf(each.stage), total: each.total, fits: each.fits, chosen: each.stage === Number(values.stage),
      parts: entries(each.kept).map(([name, value]) => ({ name, value })),
    }));
    const words = found.stages.map((each) => `${nameOf(each.stage)} ${quantity(each.total, "B", 3)}${each.fits ? "" : ", too much"}`);
    return { bars, limit: { value: found.room, name: `${found.device.name}: ${quantity(found.room, "B", 4)}` }, label: `Bytes on each rank: ${words.join("; ")}; limit ${quantity(found.room, "B", 3)}.` };
  }

  function build(host) {
    const line = h("p", { class: "mlf-verdict", role: "status" });
    const list = h("dl", { class: "mlf-facts simple" });
    const legend = h("p", { class: "mlf-legend" });
    const figure = h("figure", {}, h("figcaption", {}, "What each rank keeps, stage by stage"), legend);
    const rest = h("div", {});
    host.append(figure, line, list, rest);
    const bars = new MLF.Bars(figure);
    return (values, found) => {
      const chosen = found.stages[Number(values.stage)];
      const [strong, more] = verdict(found, chosen, values);
      line.replaceChildren(h("strong", {}, strong), more);
      list.replaceChildren(...MLF.facts(figures(found, chosen, values)));
      legend.replaceChildren(...entries(found.precision).filter(([, size]) => size).map(([name, size]) =>
        h("span", {}, h("span", { class: `mlf-swatch mlf-${name}`, "aria-hidden": "true" }), `${name} ${size} B`)));
      bars.update(picture(found, values));
      const { device } = found;
      rest.replaceChildren(...tables(found, values).flat(), MLF.sources([
        [`${device.fullName}, memory`, quantity(device.memoryBytes, "B"), device.sources.memoryBytes],
        [`${device.fullName}, ${values.rate} peak, dense`, quantity(found.peak, "FLOP/s"), device.sources.peakFlops],
        ["A rank sends at", quantity(found.bandwidth, "B/s"), found.linkSource],
        ["Bytes a parameter", `${F.total(found.precision)} B`, data.precisions[values.recipe].source],
        ...(values.model === OWN ? [] : [[`${values.model}, parameters`, number(found.psi), data.models[values.model].source]]),
      ]));
    };
  }

  MLF.start({ name: "memory", title: "Explorer of training memory and communication", groups, compute, build });
})(globalThis);
