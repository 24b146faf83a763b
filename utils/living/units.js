/* Numbers as the course prints them: utils/units.py in JavaScript, and the numbers that a reader types. */
(function (root) {
  "use strict";

  const MLF = (root.MLF = root.MLF || {});
  const PREFIXED = ["FLOP/s", "FLOP", "B/s", "B", "s", "Hz"];
  const PREFIXES = { "-12": "p", "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E" };
  const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

  const thousands = (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ",");

  /** [digits, power]: a positive number rounded to `count` significant digits, halves to the even one as Python does. */
  function rounded(value, count) {
    const [mantissa, exponent] = value.toExponential(100).split("e"); // exact where a half is: a half has few digits
    const all = mantissa.replace(".", "");
    const rest = all.slice(count);
    let digits = BigInt(all.slice(0, count));
    const isHalf = /^50*$/.test(rest);
    if (isHalf ? digits % 2n === 1n : rest[0] >= "5") digits += 1n;
    let power = Number(exponent);
    let text = digits.toString();
    if (text.length > count) [text, power] = [text.slice(0, count), power + 1];
    return [text, power];
  }

  const trimmed = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);

  /** utils.units.number: a BigInt in full ("1,792"), a number with `digits` significant digits. */
  function number(value, digits = 5) {
    if (typeof value === "bigint") return (value < 0n ? "−" : "") + thousands((value < 0n ? -value : value).toString());
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
    if (value === 0) return "0";
    const sign = value < 0 ? "−" : "";
    const [text, power] = rounded(Math.abs(value), digits);
    if (power >= -4 && power < 7) {
      const point = power + 1;
      const padded = point <= 0 ? "0".repeat(1 - point) + text : text.padEnd(point, "0");
      const whole = padded.slice(0, Math.max(1, point));
      return sign + trimmed(`${thousands(whole)}.${padded.slice(Math.max(1, point))}`);
    }
    const raised = [...String(power)].map((each) => SUPERSCRIPT[each]).join("");
    return `${sign}${trimmed(`${text[0]}.${text.slice(1)}`)}×10${raised}`;
  }

  /** utils.units.scale: [factor, prefixed unit]. */
  function scale(value, unit) {
    if (!PREFIXED.includes(unit) || value === 0 || !Number.isFinite(value)) return [1, unit];
    const power = 3 * Math.floor((Math.log10(Math.abs(value)) + 1e-9) / 3);
    const kept = unit === "s" ? Math.min(0, Math.max(-12, power)) : Math.min(18, Math.max(0, power));
    return [Number(`1e${kept}`), PREFIXES[kept] + unit];
  }

  /** utils.units.quantity: a number with its unit, "3.35 TB/s". */
  function quantity(value, unit = "", digits = 5) {
    if (typeof value === "bigint" || !PREFIXED.includes(unit)) return `${number(value, digits)} ${unit}`.trimEnd();
    const [factor, scaled] = scale(value, unit);
    return `${number(value / factor, digits)} ${scaled}`;
  }

  /** A large count in words: "7.5 billion". */
  function many(value, digits = 4) {
    const [factor, word] = [[1e12, "trillion"], [1e9, "billion"], [1e6, "million"]].find(([each]) => value >= each) || [1, ""];
    return `${number(value / factor, digits)} ${word}`.trimEnd();
  }

  const SHOWN_AT_MOST = 24;
  const quoted = (text) => `“${text.length > SHOWN_AT_MOST ? `${text.slice(0, SHOWN_AT_MOST)}…` : text}”`;

  const DECIMAL = /^([+-]?)(\d{1,3}(?:[,_ \u00a0\u202f]\d{3})+|\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,3}))?$/;
  const POWER = /^(\d{1,3})\s*(?:\^|\*\*)\s*(\d{1,2})$/;
  const MULTIPLE = /^(.*\d\.?)\s*(k|K|M|G|B|b|T|P|thousand|million|billion|trillion|Ki|Mi|Gi|Ti)$/;
  const TENS = { k: 3, K: 3, thousand: 3, M: 6, million: 6, G: 9, B: 9, b: 9, billion: 9, T: 12, trillion: 12, P: 15 };
  const TWOS = { Ki: 10n, Mi: 20n, Gi: 30n, Ti: 40n };

  /** The decimal that a reader typed, as [integer, tenths]: integer x 10^-tenths; or null. Understood are "4096",
      "4,096", "7.5e9", "4k" (4,000), "4Ki" (4,096), "70B" and "70 billion", "2^12" and "2**12". */
  function decimal(text) {
    const plain = text.trim().replace("−", "-");
    const power = POWER.exec(plain);
    if (power) return [BigInt(power[1]) ** BigInt(power[2]), 0];
    const multiple = MULTIPLE.exec(plain);
    const found = DECIMAL.exec(multiple ? multiple[1] : plain);
    if (!found) return null;
    const [whole, tenths] = [found[2].replace(/\D/g, ""), found[3] || ""];
    if (!(whole + tenths)) return null;
    const digits = BigInt(whole + tenths) * (found[1] === "-" ? -1n : 1n);
    const places = tenths.length - Number(found[4] || 0);
    if (!multiple) return [digits, places];
    const unit = multiple[2];
    return unit in TWOS ? [digits << TWOS[unit], places] : [digits, places - TENS[unit]];
  }

  /** What a number that is written with a letter or a power means: "4k" -> "= 4,000"; "" for plain digits. */
  function meant(text) {
    const found = /[a-df-zA-DF-Z^*]/.test(text) ? decimal(text) : null;
    return found ? `= ${number(Number(`${found[0]}e${-found[1]}`), 9)}` : "";
  }

  /** The whole number in `text` as BigInt, between `least` and `most`; an InputError says what would be right. */
  function parseWhole(field, text, least, most) {
    let [digits, tenths] = read(field, text, "a whole number");
    if (tenths < 0) [digits, tenths] = [digits * 10n ** BigInt(-tenths), 0];
    const unit = 10n ** BigInt(tenths);
    if (digits % unit !== 0n) throw new MLF.InputError(field, `Must be a whole number, not ${quoted(text.trim())}.`);
    return within(field, digits / unit, BigInt(least), BigInt(most));
  }

  /** The number in `text`, between `least` and `most`. */
  function parseNumber(field, text, least, most) {
    const [digits, tenths] = read(field, text, "a number");
    return within(field, Number(`${digits}e${-tenths}`), least, most);
  }

  function read(field, text, kind) {
    if (typeof text !== "string" || !text.trim()) throw new MLF.InputError(field, `Enter ${kind}.`);
    const found = text.length > 60 ? null : decimal(text);
    if (!found) throw new MLF.InputError(field, `Enter ${kind}, such as 4096, 4k or 7.5e9; ${quoted(text.trim())} is none.`);
    return found;
  }

  function within(field, value, least, most) {
    if (value < least) throw new MLF.InputError(field, `Must be at least ${number(least)}.`);
    if (value > most) throw new MLF.InputError(field, `Must be at most ${number(most)}.`);
    return value;
  }

  MLF.units = { number, scale, quantity, many, meant, parseWhole, parseNumber };
})(globalThis);
