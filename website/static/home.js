// The home page: plays the figure of attention done twice, and shows on the course map what a lesson builds on.
// Without this script both stand as still pictures. Every number comes from the page's own data (website/hero.py).
(function () {
  "use strict";
  var SECONDS = 14; // that the longer of the two runs takes here

  function all(root, what) { return Array.prototype.slice.call(root.querySelectorAll(what)); }

  // ---- numbers as the course prints them: three digits and an SI prefix
  function quantity(value, unit) {
    var power = value > 0 ? 3 * Math.floor(Math.log10(value) / 3 + 1e-9) : 0;
    power = unit === "s" ? Math.max(-6, Math.min(0, power)) : Math.max(0, power);
    var scaled = value / Math.pow(10, power);
    var digits = scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
    var prefix = { "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T" }[power];
    return scaled.toFixed(digits) + " " + prefix + unit;
  }
  function plainly(value, unit) { return quantity(value, unit).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " "); }
  function count(value) { return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ","); }
  function sum(list) { return list.reduce(function (a, b) { return a + b; }, 0); }

  // ---- what each way has done after t seconds
  function eagerAt(length, t, tiles) {
    var total = sum(length.eager_kernels.map(function (k) { return k[1]; })), squares = tiles * tiles;
    var time = Math.min(t, length.eager_seconds), moved = total * time / length.eager_seconds, left = moved;
    var done = length.eager_kernels.map(function (k) {
      var share = Math.min(1, left / k[1]);
      left = Math.max(0, left - k[1]);
      return share >= 1 - 1e-9 ? squares : Math.floor(share * squares + 1e-9);
    });
    var output = length.eager_peak - 2 * length.scores;
    var memory = (length.scores * (done[0] + done[1]) + output * done[2]) / squares;
    return { time: time, bytes: moved, memory: memory, done: done, over: time >= length.eager_seconds };
  }

  function flashAt(length, t, tiles) {
    var squares = tiles * tiles, time = Math.min(t, length.seconds);
    var over = time >= length.seconds, at = over ? squares : Math.floor(time / length.seconds * squares + 1e-9);
    var row = Math.floor(at / tiles), rows = Math.min(tiles, row + 1), columns = over ? tiles : Math.min(tiles, at + 1);
    var reads = length.reads;
    return {
      time: time, over: over, at: at, row: row, column: at % tiles,
      bytes: (reads[0] * rows + (reads[1] + reads[2]) * columns + length.writes * row) / tiles,
      memory: length.peak * row / tiles
    };
  }

  function stopsOf(length, tiles) {
    var stops = [], squares = tiles * tiles;
    for (var i = 0; i <= squares; i++) stops.push(length.seconds * i / squares);
    if (!length.eager_seconds) return stops;
    var total = sum(length.eager_kernels.map(function (k) { return k[1]; })), before = 0;
    length.eager_kernels.forEach(function (k) {
      for (var j = 1; j <= tiles; j++) stops.push(length.eager_seconds * (before + k[1] * j / tiles) / total);
      before += k[1];
    });
    stops.sort(function (a, b) { return a - b; });
    return stops.filter(function (s, i) { return !i || s - stops[i - 1] > 1e-12; });
  }

  function hero(root) {
    var data = JSON.parse(root.querySelector("#hero-data").textContent), tiles = data.tiles, squares = tiles * tiles;
    var calm = window.matchMedia && window.matchMedia("(prefers-reduced-motion: reduce)");
    var panels = all(root, ".hero-panels section").map(function (section) {
      return {
        section: section, svg: section.querySelector("svg"), s: all(section, "[data-s]"), p: all(section, "[data-p]"),
        q: all(section, "[data-q]"), k: all(section, "[data-k]"), v: all(section, "[data-v]"), o: all(section, "[data-o]")
      };
    });
    var eager = panels[0], flash = panels[1], missing = root.querySelector(".no-fit"), say = root.querySelector(".say");
    var length, stops, now = 0, playing = false, last = null;

    function set(element, name) {
      if (element && element.getAttribute("class") !== name) element.setAttribute("class", name);
    }
    function meter(panel, name, value, whole, unit) {
      panel.section.querySelector("[data-" + name + "]").textContent = value === null ? "–" : quantity(value, unit);
      var share = value === null ? 0 : Math.min(100, 100 * value / whole);
      panel.section.querySelector("." + name + " i").style.width = share + "%";
    }

    function paintEager(state) {
      var d = state ? state.done : [0, 0, 0], busy = -1;
      if (state && !state.over) busy = d[0] < squares ? 0 : d[1] < squares ? 1 : 2;
      eager.s.forEach(function (cell, i) { set(cell, busy >= 0 && i === d[busy] ? "s chip" : i < d[0] ? "s on" : "s"); });
      eager.p.forEach(function (cell, i) { set(cell, i < d[1] ? "p on" : "p"); });
      for (var i = 0; i < tiles; i++) {
        set(eager.o[i], (i + 1) * tiles <= d[2] ? "io hbm" : "io");
        ["q", "k", "v"].forEach(function (name) { set(eager[name][i], "io hbm"); });
      }
      if (busy === 0) { set(eager.q[Math.floor(d[0] / tiles)], "io chip"); set(eager.k[d[0] % tiles], "io chip"); }
      if (busy === 2) { set(eager.v[d[2] % tiles], "io chip"); set(eager.o[Math.floor(d[2] / tiles)], "io chip"); }
    }
    function paintFlash(state) {
      flash.s.forEach(function (cell, i) { set(cell, i === state.at ? "s chip" : i < state.at ? "s done" : "s"); });
      for (var i = 0; i < tiles; i++) {
        var row = !state.over && i === state.row, column = !state.over && i === state.column;
        set(flash.q[i], row ? "io chip" : "io hbm");
        set(flash.o[i], row ? "io chip" : i < state.row ? "io hbm" : "io");
        set(flash.k[i], column ? "io chip" : "io hbm");
        set(flash.v[i], column ? "io chip" : "io hbm");
      }
    }

    function sentence(e, f) {
      var side = length.n / tiles, fast;
      if (f.over) fast = "FlashAttention is done.";
      else {
        fast = "FlashAttention: queries " + count(f.row * side) + "–" + count((f.row + 1) * side - 1) + " meet keys " +
          count(f.column * side) + "–" + count((f.column + 1) * side - 1) +
          (!f.row ? ", which come from HBM." : length.counted ? ", which now come from the L2 cache." : ", read again.");
      }
      if (!e) return fast + " Eager attention cannot start.";
      var step = e.over ? "Eager attention is done." : e.done[0] < squares ? "Eager: kernel 1 of 3 writes the scores." :
        e.done[1] < squares ? "Eager: kernel 2 reads the scores and writes probabilities." :
          "Eager: kernel 3 reads the probabilities and sums values.";
      return fast + " " + step;
    }

    function go(t) {
      now = Math.max(0, Math.min(stops[stops.length - 1], t));
      var e = length.eager_seconds ? eagerAt(length, now, tiles) : null, f = flashAt(length, now, tiles);
      draw(e, f);
      var text = sentence(e, f);
      if (say.textContent !== text) say.textContent = text;
      slider.value = now / stops[stops.length - 1] * 1000;
      slider.setAttribute("aria-valuetext", quantity(now, "s") + " of " + quantity(stops[stops.length - 1], "s"));
      root.classList.toggle("running", !f.over || Boolean(e && !e.over));
    }
    function draw(e, f) {
      var whole = sum(length.eager_kernels.map(function (k) { return k[1]; }));
      paintEager(e);
      paintFlash(f);
      meter(eager, "time", e && e.time, length.eager_seconds, "s");
      meter(eager, "bytes", e && e.bytes, whole, "B");
      meter(eager, "memory", e && e.memory, length.eager_peak, "B");
      meter(flash, "time", f.time, length.eager_seconds || length.seconds, "s");
      meter(flash, "bytes", f.bytes, whole, "B");
      meter(flash, "memory", f.memory, length.eager_peak || 2 * length.scores, "B");
    }
    function finish() { // both at their end, as the page came
      go(stops[stops.length - 1]);
      say.textContent = (length.eager_seconds ? "Both have run." : "Only FlashAttention has run.") +
        " Play it again, or go step by step.";
      root.querySelector(".verdict").dataset.pace = pace();
    }
    function pace() {
      var slower = SECONDS / stops[stops.length - 1], digits = Math.pow(10, Math.floor(Math.log10(slower)) - 1);
      return "Played " + count(Math.round(slower / digits) * digits) + " times slower than it ran";
    }

    function choose(n) {
      length = data.lengths.filter(function (one) { return one.n === n; })[0];
      stops = stopsOf(length, tiles);
      missing.hidden = Boolean(length.eager_seconds);
      eager.svg.classList.toggle("unfit", !length.eager_seconds);
      missing.textContent = "Does not fit: the scores alone take " + plainly(length.scores, "B") + ", the GPU has " +
        plainly(data.gpuBytes, "B") + ".";
      verdict();
      pause();
      finish();
    }
    function verdict() {
      var gains = { time: length.eager_seconds && length.eager_seconds / length.seconds,
        bytes: length.counted && length.counted[0] / length.counted[1],
        memory: length.eager_peak && length.eager_peak / length.peak };
      Object.keys(gains).forEach(function (name) {
        var item = root.querySelector('[data-verdict="' + name + '"]'), gain = gains[name];
        item.hidden = !gain;
        if (gain) item.querySelector("b").textContent = (gain < 10 ? gain.toFixed(1) : count(gain)) + "×";
      });
      root.querySelector(".verdict").classList.toggle("none", !length.eager_seconds);
    }

    // ---- controls
    var PATHS = { play: "M4 2l10 6-10 6z", pause: "M3 2h4v12H3zM9 2h4v12H9z", back: "M13 2L5 8l8 6zM3 2h2v12H3z",
      forward: "M3 2l8 6-8 6zM11 2h2v12h-2z", restart: "M8 2a6 6 0 1 0 6 6h-2a4 4 0 1 1-4-4v3l5-4-5-4z" };
    var bar = root.querySelector(".buttons");
    function icon(name) {
      return '<svg viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path fill="currentColor" d="' + PATHS[name] + '"/></svg>';
    }
    function control(name, label, act) {
      var made = document.createElement("button");
      made.type = "button";
      made.innerHTML = icon(name);
      made.setAttribute("aria-label", label);
      made.title = label;
      made.addEventListener("click", act);
      bar.appendChild(made);
      return made;
    }
    var toggle = control("play", "Play", function () { if (playing) pause(); else play(); });
    control("back", "One step back", function () { step(-1); });
    control("forward", "One step forward", function () { step(1); });
    control("restart", "Back to the start", function () { pause(); go(0); });
    var slider = document.createElement("input");
    slider.type = "range";
    slider.min = 0;
    slider.max = 1000;
    slider.step = "any";
    slider.setAttribute("aria-label", "time since the start");
    slider.addEventListener("input", function () {
      pause();
      go(Number(slider.value) / 1000 * stops[stops.length - 1]);
    });
    bar.appendChild(slider);

    function step(direction) {
      pause();
      var slack = 1e-7 * stops[stops.length - 1], next;
      if (direction > 0) next = stops.filter(function (s) { return s > now + slack; })[0];
      else next = stops.filter(function (s) { return s < now - slack; }).pop();
      if (next !== undefined) go(next);
    }
    function face(name, label) {
      toggle.innerHTML = icon(name) + "<span>" + label + "</span>";
      toggle.setAttribute("aria-label", label);
      toggle.title = label;
      say.setAttribute("aria-live", name === "pause" ? "off" : "polite");
    }
    function pause() { playing = false; last = null; face("play", "Play"); }
    function play() {
      if (now >= stops[stops.length - 1]) go(0);
      playing = true;
      face("pause", "Pause");
      window.requestAnimationFrame(tick);
    }
    function tick(stamp) {
      if (!playing) return;
      if (last === null) { last = stamp; if (now === 0) go(0); }
      if (calm && calm.matches) { // reduced motion: from stop to stop, unhurried
        if (stamp - last > 900) {
          last = stamp;
          var next = stops.filter(function (s) { return s > now * (1 + 1e-9); })[0];
          go(next === undefined ? stops[stops.length - 1] : next);
        }
      } else {
        go(now + stops[stops.length - 1] / SECONDS * Math.min(0.1, (stamp - last) / 1000));
        last = stamp;
      }
      if (now >= stops[stops.length - 1]) pause();
      else window.requestAnimationFrame(tick);
    }

    all(root, 'input[name="hero-n"]').forEach(function (input) {
      input.addEventListener("change", function () {
          choose(Number(input.value));
        if (!(calm && calm.matches)) play();
      });
      if (Number(input.value) === data.start) input.checked = true;
    });
    root.querySelector(".hero-controls").hidden = false;
    choose(data.start);
  }

  // ---- the map: a lesson that has focus, or is pointed at, shows all that it builds on
  function map(svg) {
    var nodes = all(svg, ".node"), edges = all(svg, ".edge");
    function show(node) {
      var keys = node ? [node.dataset.key].concat(node.dataset.needs.split(" ")) : [];
      svg.classList.toggle("chosen", Boolean(node));
      nodes.forEach(function (one) { one.classList.toggle("needed", keys.indexOf(one.dataset.key) >= 0); });
      edges.forEach(function (one) { one.classList.toggle("needed", keys.indexOf(one.dataset.to) >= 0); });
    }
    nodes.forEach(function (node) {
      node.addEventListener("mouseenter", function () { show(node); });
      node.addEventListener("focus", function () { show(node); });
      node.addEventListener("mouseleave", function () { show(null); });
      node.addEventListener("blur", function () { show(null); });
    });
  }

  function start() {
    all(document, "#hero").forEach(hero);
    all(document, ".course-map svg").forEach(map);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
