// A player for one animation: buttons, a slider and a canvas, without any request to elsewhere.
// Called as (player)(data, key): it takes over every element with data-mlf=key that is not taken yet, so that several
// animations, and one shown twice, live on one page. Without scripts the static picture inside that element stays.
(function (data, key) {
  "use strict";
  var INK = "#222222", MUTED = "#5F5F5F", RULE = "#C9C9C9";

  function element(name, attributes, parent) {
    var made = document.createElement(name);
    Object.keys(attributes).forEach(function (k) { made.setAttribute(k, attributes[k]); });
    if (parent) parent.appendChild(made);
    return made;
  }

  function icon(path) {
    return '<svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true" focusable="false">' +
      '<path fill="currentColor" d="' + path + '"/></svg>';
  }
  var ICONS = {
    play: icon("M4 2l10 6-10 6z"), pause: icon("M3 2h4v12H3zM9 2h4v12H9z"),
    back: icon("M13 2L5 8l8 6zM3 2h2v12H3z"), forward: icon("M3 2l8 6-8 6zM11 2h2v12h-2z"),
    restart: icon("M8 2a6 6 0 1 0 6 6h-2a4 4 0 1 1-4-4v3l5-4-5-4z")
  };

  // ---- what is drawn: each painter says where one may stop, what to say there, and paints a moment --------------------

  function frames(canvas) {
    var drawn = -1;
    var patches = data.frames.map(function (patch) {
      var image = new Image();
      image.src = "data:image/png;base64," + patch[2];
      return { x: patch[0], y: patch[1], image: image };
    });
    var context = canvas.getContext("2d");
    canvas.width = data.width;
    canvas.height = data.height;
    return {
      stops: patches.map(function (_, k) { return k; }),
      speed: 1 / data.period,
      ready: Promise.all(patches.map(function (p) { return p.image.decode(); })),
      say: function (t) {
        var k = Math.floor(t + 1e-9);
        return (k + 1) + " of " + patches.length + (data.captions.length ? ": " + data.captions[k] : "");
      },
      paint: function (t) {
        var k = Math.floor(t + 1e-9), from = k < drawn ? 0 : drawn + 1;
        for (var i = from; i <= k; i++) context.drawImage(patches[i].image, patches[i].x, patches[i].y);
        drawn = k;
      }
    };
  }

  function waves(canvas, stage) {
    var tiles = data.tiles, end = data.end, slots = data.sms * data.per_sm, place = data.per_sm > 1 ? "places" : "SMs", seen = {}, stops = [0];
    tiles.forEach(function (tile) { seen[tile[2]] = 1; seen[tile[3]] = 1; });
    Object.keys(seen).map(Number).sort(function (a, b) { return a - b; }).forEach(function (t) {
      if (t > stops[stops.length - 1] + 1e-9 * end) stops.push(t);
    });

    function busyAt(t) {
      return tiles.filter(function (tile) { return tile[2] <= t && t < tile[3]; }).length;
    }
    var profile = stops.map(busyAt);

    function panel(c, title, x, y, size, columns, count, height, fill) {
      var rows = Math.ceil(count / columns), w = size / columns, h = Math.min(height / rows, w * 2.2);
      c.fillStyle = INK;
      c.font = "600 13px system-ui, sans-serif";
      c.textAlign = "left";
      c.fillText(title, x, y + 12);
      for (var k = 0; k < count; k++) {
        var gap = w > 6 ? 1 : 0.5;
        fill(k, x + (k % columns) * w, y + 20 + Math.floor(k / columns) * h, w - gap, h - gap);
      }
    }

    function curve(c, t, x, y, w, h) {
      c.fillStyle = INK;
      c.font = "600 13px system-ui, sans-serif";
      c.textAlign = "left";
      c.fillText("Busy " + place + " over time", x, y + 12);
      var top = y + 22, bottom = y + h - 20;
      c.fillStyle = data.colours.idle;
      c.fillRect(x, top, w, bottom - top);
      for (var k = 0; k < stops.length - 1; k++) {
        var a = x + w * stops[k] / end, b = x + w * Math.min(t, stops[k + 1]) / end;
        var high = (bottom - top) * profile[k] / slots;
        if (stops[k] >= t) break;
        c.fillStyle = data.colours.busy;
        c.fillRect(a, bottom - high, b - a + (b < x + w * t / end ? 0.6 : 0), high);
      }
      c.fillStyle = "#000000";
      c.fillRect(Math.min(x + w - 1, x + w * t / end), top - 4, 1.5, bottom - top + 8);
      c.fillStyle = MUTED;
      c.font = "12px system-ui, sans-serif";
      c.fillText("0", x, y + h - 4);
      c.textAlign = "right";
      c.fillText(data.end_text, x + w, y + h - 4);
    }

    return {
      stops: stops,
      speed: end / data.seconds,
      ready: Promise.resolve(),
      say: function (t) {
        var done = tiles.filter(function (tile) { return tile[3] <= t; }).length;
        return "Time " + (Math.round(100 * t) / 100) + " of " + data.end_text + ": " + busyAt(t) + " of " + slots +
          " " + place + " busy, " + done + " of " + tiles.length + " tiles done";
      },
      paint: function (t) {
        var wide = stage.clientWidth >= 520, width = Math.max(260, stage.clientWidth), pad = 12;
        var half = wide ? (width - 3 * pad) / 2 : width - 2 * pad;
        var block = wide ? 210 : 170, height = (wide ? block : 2 * block) + 130, scale = window.devicePixelRatio || 1;
        if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
          canvas.width = Math.round(width * scale);
          canvas.height = Math.round(height * scale);
        }
        var c = canvas.getContext("2d");
        c.setTransform(scale, 0, 0, scale, 0, 0);
        c.fillStyle = "#FFFFFF";
        c.fillRect(0, 0, width, height);
        var busy = {}, state = tiles.map(function (tile) {
          var now = tile[2] <= t && t < tile[3];
          if (now) busy[tile[0]] = (busy[tile[0]] || 0) + 1;
          return now ? 1 : tile[3] <= t ? 2 : 0;
        });
        panel(c, tiles.length + " tiles of the output", pad, 6, half, data.columns, tiles.length, block - 34,
          function (k, x, y, w, h) {
            c.fillStyle = [null, data.colours.busy, data.colours.done][state[k]] || "#FFFFFF";
            c.fillRect(x, y, w, h);
            if (!state[k]) { c.strokeStyle = RULE; c.lineWidth = 1; c.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1); }
          });
        panel(c, data.sms + " SMs", wide ? 2 * pad + half : pad, wide ? 6 : block + 6, half, data.sm_columns, data.sms,
          block - 34, function (k, x, y, w, h) {
            var share = (busy[k] || 0) / data.per_sm;
            c.fillStyle = data.colours.idle;
            c.fillRect(x, y, w, h);
            c.fillStyle = data.colours.busy;
            c.fillRect(x, y + h * (1 - share), w, h * share);
          });
        curve(c, t, pad, height - 124, width - 2 * pad, 118);
      }
    };
  }

  // ---- the player -----------------------------------------------------------------------------------------------------

  function start(root) {
    root.setAttribute("data-ready", "");
    var stage = element("div", { style: "max-width:" + data.max_width + "px;color:inherit" });
    if (data.title) {
      element("div", { style: "font-weight:bold;margin:0 0 6px" }, stage).textContent = data.title;
    }
    var canvas = element("canvas", { role: "img", "aria-label": data.alt,
      style: "display:block;width:100%;background:#FFFFFF;border-radius:3px" }, stage);
    var bar = element("div", { role: "group", "aria-label": "animation controls",
      style: "display:flex;gap:6px;align-items:center;margin:6px 0 0;color:inherit" }, stage);
    var text = element("div", { "aria-live": "polite", style: "margin:4px 0 0;min-height:1.4em;color:inherit" }, stage);
    var button = "font:inherit;color:inherit;background:transparent;border:1px solid currentColor;border-radius:6px;" +
      "padding:0;width:40px;height:36px;display:inline-flex;align-items:center;justify-content:center;cursor:pointer";
    function control(name, label, act) {
      var made = element("button", { type: "button", "aria-label": label, title: label, style: button }, bar);
      made.innerHTML = ICONS[name];
      made.addEventListener("click", act);
      return made;
    }
    var painter = { frames: frames, waves: waves }[data.kind](canvas, stage);
    var stops = painter.stops, last = stops[stops.length - 1], now = 0, playing = false, before = null;
    var calm = window.matchMedia && window.matchMedia("(prefers-reduced-motion: reduce)");

    var restart = control("restart", "Back to the start", function () { pause(); go(0); });
    control("back", "One step back", function () { step(-1); });
    var toggle = control("play", "Play", function () { if (playing) pause(); else play(); });
    control("forward", "One step forward", function () { step(1); });
    var slider = element("input", { type: "range", min: 0, max: last, step: "any", value: 0,
      "aria-label": "position in the animation", style: "flex:1;min-width:60px;accent-color:currentColor" }, bar);
    slider.addEventListener("input", function () { pause(); go(Number(slider.value)); });

    function go(t) {
      now = Math.max(0, Math.min(last, t));
      slider.value = now;
      var said = painter.say(now);
      slider.setAttribute("aria-valuetext", said);
      text.textContent = said;
      painter.paint(now);
    }
    function step(direction) {
      pause();
      var slack = 1e-9 * last, next = now;
      if (direction > 0) next = stops.find(function (s) { return s > now + slack; });
      else next = stops.filter(function (s) { return s < now - slack; }).pop();
      if (next !== undefined) go(next);
    }
    function face(name, label) {
      toggle.innerHTML = ICONS[name];
      toggle.setAttribute("aria-label", label);
      toggle.title = label;
      text.setAttribute("aria-live", name === "pause" ? "off" : "polite");
    }
    function pause() { playing = false; before = null; face("play", "Play"); }
    function play() {
      if (now >= last) go(0);
      playing = true;
      face("pause", "Pause");
      window.requestAnimationFrame(tick);
    }
    function tick(stamp) {
      if (!playing || !document.contains(root)) return;
      if (before === null) before = stamp;
      if (calm && calm.matches) {  // reduced motion: from stop to stop instead of a smooth run
        if (stamp - before > 900) {
          before = stamp;
          var next = stops.find(function (s) { return s > now + 1e-9 * last; });
          go(next === undefined ? last : next);
        }
      } else {
        go(now + painter.speed * Math.min(0.1, (stamp - before) / 1000));
        before = stamp;
      }
      if (now >= last) pause();
      else window.requestAnimationFrame(tick);
    }

    root.addEventListener("keydown", function (event) {
      var act = { ArrowRight: function () { step(1); }, ArrowLeft: function () { step(-1); },
        Home: function () { pause(); go(0); }, End: function () { pause(); go(last); } }[event.key];
      if (event.key === " " && event.target.tagName !== "BUTTON") act = function () { toggle.click(); };
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      act();
    });

    painter.ready.then(function () {
      Array.prototype.slice.call(root.querySelectorAll("img")).forEach(function (image) { image.remove(); });
      root.appendChild(stage);
      go(0);
      if (window.ResizeObserver) {
        var width = stage.clientWidth;
        new ResizeObserver(function () {
          if (stage.clientWidth !== width) { width = stage.clientWidth; painter.paint(now); }
        }).observe(stage);
      }
      if (window.IntersectionObserver && !(calm && calm.matches)) {  // plays once, when it is first seen
        var watch = new IntersectionObserver(function (entries) {
          if (!entries[0].isIntersecting) return;
          watch.disconnect();
          if (now === 0) play();
        }, { threshold: 0.5 });
        watch.observe(stage);
      }
    });
    void restart;
  }

  Array.prototype.forEach.call(document.querySelectorAll('[data-mlf="' + key + '"]:not([data-ready])'), start);
})
