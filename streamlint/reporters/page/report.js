"use strict";
(() => {
  const began = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const KINDS = data.kinds;
  const MAX_BARS = 3000;
  const MAX_LABELS = 250;
  const ROW = 22;
  const SIDE = 264;
  const EDGE = 16;
  const AXIS = 30;
  const MAX_ROWS = 80;
  const LISTED = 300;
  const WORDS = {
    kernel: "kernel", graph: "graph", HtoD: "copy to the device", DtoH: "copy to the host",
    copy: "other copy", memset: "memset", migration: "page migration",
    wait: "host waits", launch: "host issues work", call: "other CUDA call",
    range: "NVTX range", mark: "NVTX mark", "idle-wait": "idle: host waited",
    "idle-call": "idle: host in other CUDA calls", "idle-host": "idle: host outside CUDA",
    "idle-queued": "idle: issued, not started", "idle-unknown": "idle: issue not recorded",
    merged: "merged",
  };
  const GROUPS = {
    gpu: "GPU streams", engine: "copy engines", idle: "GPU idle", host: "host threads",
    nvtx: "NVTX",
  };
  const byId = (id) => document.getElementById(id);
  const plot = byId("plot");
  const canvas = document.createElement("canvas");
  const tip = byId("tip");
  const compared = data.captures.length > 1;

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name === "on") element.addEventListener("click", value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children) {
      if (child !== null && child !== undefined) element.append(child);
    }
    return element;
  }

  // Plotly reads a little markup in its texts: names must come through as they are.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text, length) => (text.length > length ? text.slice(0, Math.max(1, length - 1)) + "…" : text);

  function duration(ns) {
    for (const [unit, factor] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]]) {
      if (Math.abs(ns) >= 0.9995 * factor) {
        const value = ns / factor;
        const size = Math.abs(value);
        return `${value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} ${unit}`;
      }
    }
    return `${Math.round(ns)} ns`;
  }
  function exact(ns) {
    if (ns < 1e4) return `${ns} ns`;
    return ns < 1e7 ? `${(ns / 1e3).toFixed(3)} us` : `${(ns / 1e6).toFixed(6)} ms`;
  }
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const counted = (n, noun, many) => `${n.toLocaleString("en")} ${n === 1 ? noun : many || noun + "s"}`;
  function bytes(n) {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (n >= size) return `${(n / size).toFixed(n / size < 10 ? 2 : 1)} ${unit}`;
    }
    return `${n} B`;
  }
  function instant(ns, step) {
    const [unit, factor] = Math.abs(ns) >= 1e9 || step >= 1e8 ? ["s", 1e9] : ["ms", 1e6];
    const digits = Math.max(0, Math.ceil(Math.log10(factor / step) - 1e-9));
    return `${(ns / factor).toFixed(digits).replace("-", "−")} ${unit}`;
  }

  // Packed columns ------------------------------------------------------------

  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const binary = atob(text);
    const found = new Uint8Array(binary.length);
    for (let i = 0; i < found.length; i++) found[i] = binary.charCodeAt(i);
    return found;
  }
  async function inflate(capture, number) {
    const element = byId(`blob-${capture}-${number}`);
    const packed = fromBase64(element.textContent);
    element.remove();
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  function unpack(raw, columns, lengths, over) {
    const found = {};
    let at = 0;
    columns.forEach((name, c) => {
      const n = lengths(name);
      const narrow = name.endsWith("2");
      const values = narrow ? new Uint16Array(n) : new Uint32Array(n);
      const p1 = at + n, p2 = p1 + n, p3 = p2 + n;
      if (narrow) for (let i = 0; i < n; i++) values[i] = raw[at + i] | (raw[p1 + i] << 8);
      else for (let i = 0; i < n; i++) values[i] = raw[at + i] | (raw[p1 + i] << 8) | (raw[p2 + i] << 16) | (raw[p3 + i] << 24);
      at += n * (narrow ? 2 : 4);
      let whole = values;
      if (over[c].length) {
        whole = Float64Array.from(values);
        for (const [i, high] of over[c]) whole[i] += high * 2 ** 32;
      }
      (found[name] ||= []).push(whole);
    });
    return found;
  }
  async function decodeLane(capture, number, lane) {
    const raw = await inflate(number, lane.blob);
    const base = lane.of === undefined ? null : capture.lanes[lane.of];
    const lengths = (name) => ({ bins: capture.bins, kept2: base && base.n })[name] ?? lane.n;
    const columns = unpack(raw, lane.columns, lengths, lane.over);
    const n = lane.n;
    lane.capture = capture;
    if (columns.moves) {
      move(lane, base, columns.kept2[0], columns.moves[0], columns.grown[0]);
      return;
    }
    const starts = new Float64Array(n);
    const before = new Float64Array(n + 1);
    const deltas = columns.starts[0], durations = columns.durations[0];
    let time = capture.first - capture.offset, busy = 0;
    for (let i = 0; i < n; i++) {
      starts[i] = time += deltas[i];
      before[i + 1] = busy += durations[i];
    }
    lane.starts = starts;
    lane.before = before;
    lane.codes = (columns.codes2 || columns.codes4)[0];
    lane.steps = columns.correlations ? columns.correlations[0] : null;
    if (columns.bins) {
      const cumulative = new Float64Array(capture.bins + 1);
      for (let i = 0; i < capture.bins; i++) cumulative[i + 1] = cumulative[i] + columns.bins[0][i];
      lane.cumulative = cumulative;
      lane.inFull = (bin) => !lane.overview && capture.inFull[bin] === 1;
    }
  }
  const signed = (value) => (value % 2 ? -(value + 1) / 2 : value / 2);
  // A replayed lane from the recorded one and what moved.
  function move(lane, base, kept, moves, grown) {
    lane.starts = new Float64Array(lane.n);
    lane.before = new Float64Array(lane.n + 1);
    lane.codes = new base.codes.constructor(lane.n);
    lane.steps = null;
    let moved = 0;
    for (let i = 0, at = 0; i < base.n; i++) {
      if (!kept[i]) continue;
      lane.starts[at] = base.starts[i] + (moved += signed(moves[at]));
      lane.before[at + 1] = lane.before[at] + base.before[i + 1] - base.before[i] + signed(grown[at]);
      lane.codes[at] = base.codes[i];
      at += 1;
    }
  }
  async function decode() {
    for (const [number, capture] of data.captures.entries()) {
      capture.offset = compared ? capture.work[0] : 0;
      if (capture.detailed) {
        capture.inFull = new Uint8Array(capture.bins);
        for (const [first, last] of capture.detailed) capture.inFull.fill(1, first, last);
      }
      const table = capture.details;
      const raw = await inflate(number, table.blob);
      const columns = unpack(raw, table.columns, () => table.n, table.over);
      const [names, ...parts] = columns.codes4;
      capture.about = { kinds: columns.codes2[0], names, parts, texts: table.names };
      for (const lane of capture.lanes) await decodeLane(capture, number, lane);
    }
  }
  // Only when its finding is chosen.
  async function decodeReplay(capture, number, replay) {
    for (const lane of replay.lanes) {
      lane.overview = replay.overview;
      await decodeLane(capture, number, lane);
    }
  }
  function correlation(lane, index) {
    if (!lane.steps) return null;
    if (!lane.correlations) {
      lane.correlations = new Float64Array(lane.n);
      let value = 0;
      for (let i = 0; i < lane.n; i++) {
        lane.correlations[i] = value += signed(lane.steps[i]);
      }
    }
    return lane.correlations[index];
  }
  const endOf = (lane, i) => lane.starts[i] + (lane.before[i + 1] - lane.before[i]);

  // How many starts are at or before time, searched from index low on.
  function upTo(lane, time, low = 0) {
    const starts = lane.starts;
    let step = 1, high = low;
    while (high < lane.n && starts[high] <= time) {
      low = high + 1;
      high += step;
      step *= 2;
    }
    if (high > lane.n) high = lane.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  // Busy ns before time; exact wherever the lane is held in full.
  function busyBefore(lane, time, index) {
    if (index === 0) return 0;
    const cut = endOf(lane, index - 1) - time;
    return lane.before[index] - (cut > 0 ? cut : 0);
  }
  function binOf(lane, time) {
    const capture = lane.capture;
    const place = (time - (capture.first - capture.offset)) / capture.bin_ns;
    return Math.min(capture.bins - 1, Math.max(0, Math.floor(place)));
  }
  function covered(lane, time, hint) {
    const index = upTo(lane, time, hint);
    if (!lane.cumulative) return [busyBefore(lane, time, index), index];
    const capture = lane.capture;
    const bin = binOf(lane, time);
    const left = capture.first - capture.offset + bin * capture.bin_ns;
    const inside = Math.min(Math.max(0, time - left), capture.bin_ns);
    if (lane.inFull(bin)) {
      const from = upTo(lane, left);
      return [lane.cumulative[bin] + busyBefore(lane, time, index) - busyBefore(lane, left, from), index];
    }
    const here = lane.cumulative[bin + 1] - lane.cumulative[bin];
    return [lane.cumulative[bin] + (here * inside) / capture.bin_ns, index];
  }
  const busyBetween = (lane, a, b) => covered(lane, b, 0)[0] - covered(lane, a, 0)[0];
  function shares(lane, a, b, columns) {
    const found = new Float64Array(columns);
    let [last, hint] = covered(lane, a, 0);
    for (let i = 0; i < columns; i++) {
      const [now, index] = covered(lane, a + ((b - a) * (i + 1)) / columns, hint);
      found[i] = Math.min(1, Math.max(0, ((now - last) * columns) / (b - a)));
      last = now;
      hint = index;
    }
    return found;
  }
  // The intervals of every kind of a lane as lanes of their own, so far as it is held.
  function byKind(lane) {
    if (lane.byKind) return lane.byKind;
    const kinds = lane.capture.about.kinds;
    const counts = new Map();
    for (let i = 0; i < lane.n; i++) counts.set(kinds[lane.codes[i]], (counts.get(kinds[lane.codes[i]]) || 0) + 1);
    lane.byKind = new Map();
    if (counts.size > 1) {
      for (const [kind, n] of counts) lane.byKind.set(kind, { n: 0, starts: new Float64Array(n), before: new Float64Array(n + 1) });
      for (let i = 0; i < lane.n; i++) {
        const part = lane.byKind.get(kinds[lane.codes[i]]);
        part.starts[part.n] = lane.starts[i];
        part.before[part.n + 1] = part.before[part.n] + lane.before[i + 1] - lane.before[i];
        part.n += 1;
      }
    } else for (const kind of counts.keys()) lane.byKind.set(kind, lane);
    return lane.byKind;
  }
  // Busy shares of a lane, and the kind that is busiest in each column.
  function coloured(lane, a, b, columns) {
    const total = shares(lane, a, b, columns);
    const parts = byKind(lane);
    const best = new Float64Array(columns);
    const kind = new Uint8Array(columns).fill(parts.size === 1 ? parts.keys().next().value : lane.kind);
    if (parts.size > 1) {
      for (const [one, part] of parts) {
        const own = shares(part, a, b, columns);
        for (let i = 0; i < columns; i++) {
          if (own[i] > best[i]) {
            best[i] = own[i];
            kind[i] = one;
          }
        }
      }
    }
    return [total, kind];
  }
  // Whether all of [a, b] of this lane is held in full.
  function heldInFull(lane, a, b) {
    if (!lane.cumulative) return true;
    for (let bin = binOf(lane, a); bin <= binOf(lane, b); bin++) if (!lane.inFull(bin)) return false;
    return true;
  }
  function visible(lane, a, b) {
    let first = upTo(lane, a);
    if (first > 0 && endOf(lane, first - 1) > a) first -= 1;
    while (first > 0 && lane.starts[first - 1] >= a) first -= 1;
    return [first, upTo(lane, b)];
  }

  // What is shown ------------------------------------------------------------

  const state = { view: [0, 1], finding: null, evidence: 0, marks: [], band: null, all: false, saving: false };
  const shown = { gpu: true, engine: true, idle: true, host: true, nvtx: true };
  let rows = [];
  let colours = {};
  let drawn = { exact: new Set(), bars: 0 };

  function grouped(items, keyOf) {
    const groups = new Map();
    for (const item of items) {
      const key = keyOf(item);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(item);
    }
    return groups;
  }
  const findings = [];
  function collect() {
    if (!compared) {
      const { findings: all, replays } = data.captures[0];
      const replayed = new Map(replays.map((replay) => [replay.finding, replay]));
      all.forEach((finding, i) => findings.push({ ...finding, capture: 0, replay: replayed.get(i) || null }));
      return;
    }
    // Processes that run one program share fingerprints: those pair in order of cost.
    const [old, now] = data.captures.map((c) => grouped(c.findings, (f) => f.fingerprint));
    for (const key of new Set([...old.keys(), ...now.keys()])) {
      const before = old.get(key) || [], after = now.get(key) || [];
      after.forEach((f, i) => findings.push({ ...f, capture: 1, replay: null, ...(before[i] ? { status: "kept", was: before[i] } : { status: "new" }) }));
      for (const f of before.slice(after.length)) findings.push({ ...f, capture: 0, replay: null, status: "gone" });
    }
    findings.sort((a, b) => (b.severity === "error") - (a.severity === "error") || (b.ns ?? -1) - (a.ns ?? -1));
  }
  function work(capture) {
    return capture.work.map((time) => time - capture.offset);
  }
  function wholeWork() {
    const bounds = data.captures.map(work);
    const a = Math.min(...bounds.map((w) => w[0])), b = Math.max(...bounds.map((w) => w[1]));
    const room = 0.03 * (b - a) || 1;
    return [a - room, b + room];
  }
  function everything() {
    const a = Math.min(...data.captures.map((c) => c.first - c.offset));
    const b = Math.max(...data.captures.map((c) => c.last - c.offset));
    return [a - 0.01 * (b - a), b + 0.01 * (b - a)];
  }

  function rebuildRows() {
    rows = [];
    const add = (title, lanes, kind) => {
      const used = lanes.filter((lane) => shown[lane.group] && lane.all);
      if (!used.length) return;
      if (title) rows.push({ title, kind });
      let heading = null;
      for (const lane of used) {
        if (lane.heading !== heading) rows.push({ heading: (heading = lane.heading) });
        rows.push({ lane });
      }
    };
    const chosen = state.finding === null ? null : findings[state.finding];
    if (compared) {
      data.captures.forEach((capture, i) => add(`${i ? "after" : "before"}: ${capture.file}`, capture.lanes, i ? "after" : "before"));
    } else {
      const replay = chosen && chosen.replay;
      add(replay ? "recorded" : null, data.captures[0].lanes, "before");
      if (replay) add(`replayed without ${chosen.rule}`, replay.lanes.filter((l) => l.group === "gpu" || l.group === "host"), "after");
    }
    state.hidden = 0;
    if (!state.all && rows.length > MAX_ROWS) {
      state.hidden = rows.slice(MAX_ROWS).filter((row) => row.lane).length;
      rows = rows.slice(0, MAX_ROWS);
    }
    byId("labels").replaceChildren(...rows.map((row, y) => {
      const text = row.lane ? row.lane.label : row.title || row.heading;
      const short = row.lane && row.lane.depth ? `level ${row.lane.depth + 1}` : text;
      const label = make("div", { class: row.lane ? "lane" : row.title ? "title" : "heading", title: text }, short);
      label.style.top = `${AXIS + y * ROW}px`;
      return label;
    }));
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = { kinds: KINDS.map((kind) => get(kind === "mark" ? "mark-nvtx" : kind)) };
    colours.onKinds = colours.kinds.map((colour) => {
      const [r, g, b] = rgb(colour).map((part) => (part / 255) ** 2.2);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10161c" : "#ffffff";
    });
    for (const name of ["bg", "panel", "ink", "quiet", "line", "grid", "band", "mark", "saving", "saving-band", "accent"]) colours[name] = get(name);
    colours.rgb = Object.assign(colours.kinds.map(rgb), { panel: rgb(colours.panel) });
  }
  const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  function mixed(a, b, share) {
    const [from, to] = [rgb(a), rgb(b)];
    return `rgb(${from.map((part, i) => Math.round(part * (1 - share) + to[i] * share)).join(",")})`;
  }
  // Thinner than a pixel: one pixel wide, as faint as the busy share of that pixel.
  function faint(kind, share) {
    const step = Math.round(8 * share);
    const known = (colours.faint ||= new Map());
    const key = 32 * kind + step;
    if (!known.has(key)) known.set(key, mixed(colours.bg, colours.kinds[kind], 0.25 + (0.75 * step) / 8));
    return known.get(key);
  }
  // Busy shares as a picture of one pixel a column, in the colour of the kind that is
  // busiest in it. Plotly takes pictures far faster than heatmaps.
  function strip(lane, a, b, columns) {
    const [total, kind] = coloured(lane, a, b, columns);
    canvas.width = columns;
    canvas.height = 1;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const image = context.createImageData(columns, 1);
    const ground = colours.rgb.panel;
    for (let i = 0; i < columns; i++) {
      const colour = colours.rgb[kind[i]];
      const part = total[i] > 0 ? 0.25 + 0.75 * total[i] : 0;
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = ground[c] + (colour[c] - ground[c]) * part;
      image.data[4 * i + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    return canvas.toDataURL();
  }

  function ticks(a, b, width) {
    const wanted = (b - a) / Math.max(2, width / 130);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = Math.max(1, [1, 2, 5, 10].find((m) => m * power >= wanted) * power);
    const found = [];
    for (let value = Math.ceil(a / step) * step; value <= b && found.length < 60; value += step) found.push(value);
    return { values: found, texts: found.map((value) => instant(value, step)) };
  }

  function draw() {
    const start = performance.now();
    const [a, b] = state.view;
    const width = Math.max(320, plot.clientWidth || plot.parentElement.clientWidth);
    const inner = width - SIDE - EDGE;
    const height = rows.length * ROW + AXIS + 6;
    const columns = Math.min(2000, Math.round(inner));

    const lanes = [];
    rows.forEach((row, y) => {
      if (!row.lane) return;
      const [first, last] = visible(row.lane, a, b);
      lanes.push({ row: y, lane: row.lane, first, last, full: heldInFull(row.lane, a, b) });
    });
    lanes.sort((p, q) => p.last - p.first - (q.last - q.first));
    // Plotly draws one path a colour far faster than thousands of bars.
    const paths = new Map();
    let bars = 0;
    const labels = { x: [], y: [], text: [], colour: [] };
    const exactRows = new Set();
    const images = [];
    let left = MAX_BARS, shared = 0, sharedRows = 0, unheld = 0;
    const pixel = (b - a) / inner;
    for (const { row, lane, first, last, full } of lanes) {
      if (full && last - first <= left) {
        left -= last - first;
        exactRows.add(row);
        const about = lane.capture.about;
        for (let i = first; i < last; i++) {
          const length = lane.before[i + 1] - lane.before[i];
          const code = lane.codes[i];
          const colour = length < pixel ? faint(about.kinds[code], length / pixel) : colours.kinds[about.kinds[code]];
          if (!paths.has(colour)) paths.set(colour, []);
          // Parts far outside would lose their edges to the precision of a screen.
          const x0 = Math.max(a - (b - a), lane.starts[i]), x1 = Math.min(b + (b - a), lane.starts[i] + Math.max(length, pixel));
          paths.get(colour).push(`M${x0},${row - 0.4}H${x1}V${row + 0.4}H${x0}Z`);
          bars += 1;
          const from = Math.max(a, lane.starts[i]), to = Math.min(b, lane.starts[i] + length);
          const room = (to - from) / pixel;
          if (room > 44 && labels.x.length < MAX_LABELS && lane.group !== "idle") {
            labels.x.push(from + 3 * pixel);
            labels.y.push(row);
            labels.colour.push(colours.onKinds[about.kinds[code]]);
            labels.text.push(plain(cut(shortName(about.texts[about.names[code]]), Math.floor((room - 8) / 6.6))));
          }
        }
      } else {
        sharedRows += 1;
        shared += full ? last - first : 0;
        unheld += full ? 0 : 1;
        images.push({
          xref: "x", yref: "y", x: a, y: row - 0.4, sizex: b - a, sizey: 0.8, xanchor: "left", yanchor: "top",
          sizing: "stretch", layer: "above", source: strip(lane, a, b, columns),
        });
      }
    }
    drawn = { exact: exactRows, bars, columns, shared, sharedRows, unheld };

    const traces = [];
    traces.push({
      type: "scatter", mode: "text", x: labels.x, y: labels.y, text: labels.text, textposition: "middle right",
      textfont: { size: 11, color: labels.colour }, hoverinfo: "skip", cliponaxis: true,
    });
    const axis = ticks(a, b, inner);
    const layout = {
      width, height, autosize: false, margin: { l: SIDE, r: EDGE, t: AXIS, b: 6 },
      paper_bgcolor: colours.bg, plot_bgcolor: colours.bg, font: { color: colours.ink, size: 12, family: "system-ui, DejaVu Sans, sans-serif" },
      showlegend: false, barmode: "overlay", bargap: 0, dragmode: false, hovermode: false,
      xaxis: { range: [a, b], side: "top", tickmode: "array", tickvals: axis.values, ticktext: axis.texts, showgrid: true, gridcolor: colours.grid, zeroline: false, fixedrange: true, ticks: "", tickfont: { size: 11 } },
      yaxis: { range: [rows.length - 0.5, -0.5], fixedrange: true, showgrid: false, zeroline: false, showticklabels: false, ticks: "" },
      images,
      shapes: shapes(paths), annotations: annotations(), uirevision: "view",
    };
    const config = { displayModeBar: false, scrollZoom: false, doubleClick: false, responsive: false, plotlyServerURL: "", showTips: false, staticPlot: false };
    // plotly.js 4.1 forgets to take away the former shapes of this layer.
    for (const path of plot.querySelectorAll(".layer-between .shapelayer path")) path.remove();
    const done = Plotly.react(plot, traces, layout, config);
    describeView();
    plot.dataset.view = `${a} ${b}`;
    return done.then(() => {
      plot.dataset.drawMs = performance.now() - start;
      plot.dataset.draws = 1 + Number(plot.dataset.draws || 0);
    });
  }
  function shortName(name) {
    const plainName = name.replace(/^void /, "");
    const end = plainName.search(/[<(]/);
    return end > 2 ? plainName.slice(0, end).replace(/^.*::/, "") : plainName;
  }
  function rowOf(capture, laneNumber) {
    return rows.findIndex((row) => row.lane === data.captures[capture].lanes[laneNumber]);
  }
  function shapes(paths) {
    const found = [];
    const bar = (path, fillcolor) => ({ type: "path", xref: "x", yref: "y", path, fillcolor, line: { width: 0 }, layer: "between" });
    if (state.band) {
      found.push({ type: "rect", xref: "x", yref: "paper", x0: state.band[0], x1: state.band[1], y0: 0, y1: 1, fillcolor: colours.band, line: { width: 1, color: colours.accent, dash: "dot" }, layer: "below" });
    }
    for (const [colour, parts] of paths) found.push(bar(parts.join(""), colour));
    const places = state.marks.map((mark) => ({ ...mark, row: rowOf(mark.capture, mark.lane) })).filter((m) => m.row >= 0);
    const issue = places.find((m) => m.role.startsWith("host call"));
    for (const mark of places) {
      found.push({ type: "rect", xref: "x", yref: "y", x0: mark.start, x1: mark.end, y0: mark.row - 0.48, y1: mark.row + 0.48, line: { color: colours.mark, width: 2.5 }, fillcolor: "rgba(0,0,0,0)", layer: "above" });
      if (issue && mark !== issue && mark.role !== "held it back") {
        found.push({ type: "line", xref: "x", yref: "y", x0: mark.role === "waited for the call" ? issue.end : issue.start, x1: mark.start, y0: issue.row + 0.5, y1: mark.row - 0.5, line: { color: colours.quiet, width: 1, dash: "dot" }, layer: "above" });
      }
    }
    const saving = savingMark();
    if (saving) {
      for (const [x, top, bottom] of [[saving.was, saving.first, rows.length - 0.5], [saving.now, saving.second, rows.length - 0.5]]) {
        found.push({ type: "line", xref: "x", yref: "y", x0: x, x1: x, y0: top - 0.5, y1: bottom, line: { color: colours.saving, width: 2, dash: "dash" }, layer: "above" });
      }
      found.unshift({ type: "rect", xref: "x", yref: "y", x0: saving.now, x1: saving.was, y0: saving.second - 0.5, y1: rows.length - 0.5, fillcolor: colours["saving-band"], line: { width: 0 }, layer: "below" });
    }
    return found;
  }
  // Where the GPU work ends before and after, and what lies between.
  function savingMark() {
    const second = rows.findIndex((row) => row.kind === "after");
    if (second < 0) return null;
    const first = Math.max(0, rows.findIndex((row) => row.kind === "before"));
    if (compared) {
      const [old, now] = data.captures.map(work);
      return { was: old[1], now: now[1], saved: old[1] - old[0] - (now[1] - now[0]), first, second };
    }
    const replay = findings[state.finding].replay;
    return { was: replay.was[1], now: replay.was[1] - replay.saved, saved: replay.saved, first, second };
  }
  function annotations() {
    const found = [];
    state.marks.forEach((mark, i) => {
      const row = rowOf(mark.capture, mark.lane);
      const [a, b] = state.view;
      if (row < 0 || mark.end < a || mark.start > b) return;
      found.push({ xref: "x", yref: "y", x: Math.max(a, mark.start), y: row, yshift: 10, xshift: -1, xanchor: "left", yanchor: "bottom", showarrow: false, text: `<b>${i + 1}</b>`, font: { size: 10, color: colours.bg }, bgcolor: colours.mark, borderpad: 1 });
    });
    const saving = savingMark();
    const [a, b] = state.view;
    if (saving && Math.max(saving.was, saving.now) > a && Math.min(saving.was, saving.now) < b) {
      const words = saving.saved >= 0 ? `${duration(saving.saved)} saved` : `${duration(-saving.saved)} longer`;
      found.push({ xref: "x", yref: "y", x: (Math.min(b, Math.max(saving.was, saving.now)) + Math.max(a, Math.min(saving.was, saving.now))) / 2, y: saving.second, xanchor: "center", yanchor: "middle", showarrow: false, text: `<b>${words}</b>`, font: { size: 12, color: colours.bg }, bgcolor: colours.saving, borderpad: 2 });
    }
    return found;
  }

  function describeView() {
    const [a, b] = state.view;
    const step = (b - a) / 1000;
    const parts = [`${instant(a, step)} to ${instant(b, step)} (${duration(b - a)})${compared ? " after the first GPU operation" : ""}.`];
    parts.push(`${counted(drawn.bars, "interval")} drawn one by one`);
    const rowsThat = (n, verb) => `${counted(n, "row")} ${n === 1 ? verb + "s" : verb}`;
    const sharing = drawn.sharedRows - drawn.unheld;
    if (sharing) {
      parts[1] += `; ${rowsThat(sharing, "show")} the exact busy share of every pixel column (${duration((b - a) / drawn.columns)}) instead, for ${counted(drawn.shared, "interval")}: zoom in for the single ones`;
    }
    if (drawn.unheld) {
      const bins = Math.max(...data.captures.map((capture) => capture.bin_ns));
      parts[1] += `; ${rowsThat(drawn.unheld, "show")} an overview, the busy time in bins of ${duration(bins)}: this page holds no more of this part`;
    }
    parts[1] += ".";
    if (state.hidden) parts.push(`${counted(state.hidden, "more row")} not shown.`);
    byId("view").textContent = parts.join(" ");
    plot.setAttribute("aria-label", `Timeline, ${rows.filter((r) => r.lane).length} rows, ${parts.join(" ")}`);
    if (byId("list").open) listView();
  }
  function listView() {
    const [a, b] = state.view;
    const body = make("tbody");
    let count = 0, more = 0;
    for (const { lane } of rows.filter((row) => row.lane)) {
      const [first, last] = visible(lane, a, b);
      const busy = busyBetween(lane, a, b);
      body.append(make("tr", {}, make("th", { scope: "row" }, lane.label), make("td", {}, counted(last - first, "interval")), make("td", { class: "number" }, ""), make("td", { class: "number" }, duration(busy)), make("td", {}, percent(busy / (b - a)) + " busy")));
      for (let i = first; i < last; i++) {
        if (count >= LISTED) { more += last - i; break; }
        count += 1;
        const [name, ...rest] = about(lane, i);
        body.append(make("tr", {}, make("td", {}, ""), make("td", { class: "message" }, cut(name, 160)), make("td", { class: "number" }, instant(lane.starts[i], 1)), make("td", { class: "number" }, exact(lane.before[i + 1] - lane.before[i])), make("td", {}, rest.slice(1).join("; "))));
      }
    }
    const head = make("thead", {}, make("tr", {}, ...["Row", "What", "Start", "Duration", "More"].map((text) => make("th", { scope: "col" }, text))));
    const box = byId("list").querySelector("div");
    box.replaceChildren(make("table", {}, head, body));
    if (more) box.append(make("p", { class: "quiet" }, `${counted(more, "more interval")} in view: zoom in to list them.`));
  }

  // Hovering ------------------------------------------------------------------

  // The name of an interval, its duration and everything else, one line each.
  function about(lane, index) {
    const { kinds, names, parts, texts } = lane.capture.about;
    const code = lane.codes[index];
    const kind = KINDS[kinds[code]];
    const ns = lane.before[index + 1] - lane.before[index];
    const p = parts.map((part) => part[code]);
    const lines = [texts[names[code]], `${WORDS[kind]}, ${exact(ns)}`];
    if (kind === "kernel" && p[0]) {
      lines.push(`grid ${p[0]} × ${p[1]} × ${p[2]}, block ${p[3]} × ${p[4]} × ${p[5]}`);
      lines.push(`${counted(p[7], "register")} a thread, ${bytes(p[6])} shared memory a block`);
    } else if (["HtoD", "DtoH", "copy", "memset", "migration"].includes(kind)) {
      const size = p[0] + p[1] * 2 ** 32;
      lines.push(bytes(size) + (ns ? `, ${(size / ns).toFixed(2)} GB/s` : ""));
      if (kind !== "memset") lines.push(`${data.memory[p[2]]} memory to ${data.memory[p[3]]} memory`);
    } else if (["wait", "launch", "call"].includes(kind) && p[0]) {
      lines.push(`returned ${p[0]}`);
    }
    lines.push(`from ${instant(lane.starts[index], 1)}`);
    const id = correlation(lane, index);
    if (id) lines.push(`correlation ${id}` + (["gpu", "engine"].includes(lane.group) ? issuedBy(lane, id) : ""));
    return lines;
  }
  // The host call of an operation, found in the lanes of its process.
  function issuedBy(lane, id) {
    // Correlation ids are unique in a process only.
    const several = lane.capture.facts.processes.length > 1;
    if (several && lane.pid === null) return "";
    for (const other of lane.capture.lanes) {
      if (other.group !== "host" || other.depth) continue;
      if (several && other.pid !== lane.pid) continue;
      const index = indexOfCorrelation(other, id);
      if (index < 0) continue;
      const { names, texts } = lane.capture.about;
      return `: ${texts[names[other.codes[index]]]} on ${other.label} at ${instant(other.starts[index], 1)}`;
    }
    return "";
  }
  function indexOfCorrelation(lane, id) {
    if (!lane.n) return -1;
    correlation(lane, 0);
    return lane.correlations.indexOf(id);
  }
  function hovered(event) {
    const box = plot.getBoundingClientRect();
    const inner = box.width - SIDE - EDGE;
    const x = event.clientX - box.left - SIDE;
    const y = Math.floor((event.clientY - box.top - AXIS) / ROW);
    if (x < 0 || x > inner || y < 0 || y >= rows.length || !rows[y].lane) return null;
    const [a, b] = state.view;
    const lane = rows[y].lane;
    const pixel = (b - a) / inner;
    const time = a + x * pixel;
    let index = upTo(lane, time) - 1;
    let hit = index >= 0 && time <= Math.max(endOf(lane, index), lane.starts[index] + 2 * pixel);
    if (!hit && index + 1 < lane.n && lane.starts[index + 1] - time < 2 * pixel) {
      index += 1;
      hit = true;
    }
    const lines = [];
    if (!drawn.exact.has(y)) {
      const step = (b - a) / drawn.columns;
      const from = a + Math.floor((time - a) / step) * step;
      const [first, last] = visible(lane, from, from + step);
      const share = busyBetween(lane, from, from + step) / step;
      lines.push(`${percent(share)} busy in this ${duration(step)}`);
      if (heldInFull(lane, from, from + step)) lines.push(counted(last - first, "interval"));
    }
    if (hit) lines.push(...about(lane, index));
    return lines.length ? lines : null;
  }
  function showTip(event) {
    const lines = event.buttons ? null : hovered(event);
    tip.hidden = !lines;
    if (!lines) return;
    tip.replaceChildren(make("b", {}, lines[0]), lines.slice(1).join("\n"));
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
  }

  // Moving about --------------------------------------------------------------

  function show(a, b) {
    const least = 20;
    if (!(b - a >= least)) [a, b] = [(a + b - least) / 2, (a + b + least) / 2];
    state.view = [a, b];
    return draw();
  }
  function zoom(factor, at = 0.5) {
    const [a, b] = state.view;
    const centre = a + at * (b - a);
    const [low, high] = everything();
    if (factor > 1 && (b - a) * factor > high - low) return show(low, high);
    return show(centre - (centre - a) * factor, centre + (b - centre) * factor);
  }
  function pan(share) {
    const [a, b] = state.view;
    return show(a + share * (b - a), b + share * (b - a));
  }
  function overview() {
    return show(...wholeWork());
  }
  function evidenceView() {
    if (state.finding === null) return overview();
    const finding = findings[state.finding];
    const item = finding.evidence[state.evidence];
    const offset = data.captures[finding.capture].offset;
    state.band = [item.start - offset, item.end - offset];
    state.marks = item.marks.map((m) => ({ ...m, capture: finding.capture, start: m.start - offset, end: m.end - offset }));
    const length = Math.max(item.end - item.start, 2000);
    let [a, b] = [state.band[0] - 0.6 * length, state.band[1] + 0.6 * length];
    // Marked places far away would shrink the evidence to nothing: only near ones count.
    for (const mark of state.marks) {
      if (mark.start > a - 6 * length && mark.end < b + 6 * length) {
        a = Math.min(a, mark.start - 0.1 * length);
        b = Math.max(b, mark.end + 0.1 * length);
      }
    }
    return show(a, b);
  }
  async function choose(number, evidence = 0) {
    const { capture, replay } = findings[number];
    if (replay) await (replay.decoded ||= decodeReplay(data.captures[capture], capture, replay));
    state.finding = number;
    state.evidence = evidence;
    for (const row of document.querySelectorAll("#findings-table tbody tr")) {
      const here = Number(row.dataset.finding) === number;
      row.classList.toggle("chosen", here);
      row.querySelector("button").setAttribute("aria-pressed", here);
    }
    if (!rows.length) return describeChosen();
    rebuildRows();
    const done = evidenceView();
    describeChosen();
    byId("evidence").disabled = false;
    byId("savings").disabled = savingMark() === null;
    const box = plot.getBoundingClientRect();
    if (box.top > innerHeight - 150 || box.bottom < 100) byId("chosen").scrollIntoView({ block: "start" });
    return done;
  }
  function savingView() {
    return overview();
  }

  function severity(finding) {
    return make("span", { class: `severity ${finding.severity}` }, finding.severity);
  }
  function amount(finding) {
    if (finding.ns === null) return "–";
    const bound = { "upper-bound": "at most ", "lower-bound": "at least ", "what-if": "about " }[finding.claim] || "";
    return bound + duration(finding.ns);
  }
  function findingsTable() {
    const box = byId("findings-table");
    if (!findings.length) {
      box.replaceChildren(make("p", { class: "quiet" }, "No findings."));
      return;
    }
    const titles = ["Severity", "Finding", "Costs", "Share", "Where"];
    if (compared) titles.unshift("Change");
    const head = make("thead", {}, make("tr", {}, ...titles.map((t) => make("th", { scope: "col", class: t === "Costs" || t === "Share" ? "number" : "" }, t))));
    const body = make("tbody");
    findings.forEach((finding, number) => {
      const cost = finding.was ? `${amount(finding.was)} → ${amount(finding)}` : amount(finding);
      const button = make("button", { type: "button", "aria-pressed": "false", "aria-controls": "chosen plot", title: "Show it on the timeline" }, finding.rule);
      const cells = [
        make("td", {}, severity(finding)),
        make("td", { class: "message" }, button, make("span", {}, finding.message)),
        make("td", { class: "number" }, cost),
        make("td", { class: "number" }, finding.share === null ? "–" : percent(finding.share)),
        make("td", { class: "place" }, cut(finding.place, 160)),
      ];
      if (compared) cells.unshift(make("td", { class: finding.status }, finding.status));
      const row = make("tr", { "data-finding": number, on: () => choose(number) }, ...cells);
      body.append(row);
    });
    const caption = make("caption", { class: "quiet" }, "Dearest first. Costs of different findings overlap: they must not be added up.");
    box.replaceChildren(make("table", {}, caption, head, body));
  }
  function describeChosen() {
    const finding = findings[state.finding];
    const item = finding.evidence[state.evidence];
    const list = make("dl");
    const entry = (name, value) => value && list.append(make("dt", {}, name), make("dd", {}, value));
    entry("cost", finding.cost);
    entry("where", finding.place);
    for (const line of finding.source) entry("source", line);
    entry("fix", finding.fix);
    const offset = data.captures[finding.capture].offset;
    entry("evidence", `${item.what}: ${duration(item.end - item.start)} from ${instant(item.start - offset, 1000)}` + (item.correlation === null ? "" : `, correlation ${item.correlation}`));
    const marks = make("ol", { "aria-label": "Marked on the timeline" });
    item.marks.forEach((mark, i) => marks.append(make("li", {}, make("span", { class: "key" }, String(i + 1)), `${mark.role}: ${cut(mark.name, 120)}, ${data.captures[finding.capture].lanes[mark.lane].label}, ${exact(mark.end - mark.start)}`)));
    if (item.marks.length) entry("marked", marks);
    const saving = savingMark();
    if (saving && !compared) {
      const [first, last] = finding.replay.was;
      const whose = data.captures[0].facts.processes.length > 1 && finding.pid !== null ? ` of process ${finding.pid}` : "";
      entry("replay", make("span", { class: "saving" }, `GPU span${whose} ${duration(last - first)} recorded, ${duration(last - first - saving.saved)} without it: ${duration(saving.saved)} saved`));
    }
    const steps = make("div", { class: "steps" });
    finding.evidence.forEach((_, i) => steps.append(make("button", { type: "button", "aria-pressed": String(i === state.evidence), on: () => choose(state.finding, i) }, `Evidence ${i + 1} of ${finding.evidence.length}`)));
    if (saving) steps.append(make("button", { type: "button", on: savingView }, compared ? "Whole runs" : "Whole run with the saving"));
    const box = byId("chosen");
    box.replaceChildren(make("h3", { id: "chosen-title" }, severity(finding), ` ${finding.rule}: ${finding.message}`), list, steps);
    box.hidden = false;
  }

  // The head and the rest -----------------------------------------------------

  function fact(name, value, extra, share, colour) {
    const box = make("div", {}, make("dt", {}, name), make("dd", {}, value, extra ? make("small", {}, ` ${extra}`) : null));
    if (share !== undefined) {
      const bar = make("i");
      bar.style.width = `${100 * share}%`;
      bar.style.background = `var(--${colour})`;
      box.append(make("div", { class: "meter", "aria-hidden": "true" }, bar));
    }
    return box;
  }
  function headOf(capture, title) {
    const facts = capture.facts;
    const box = make("div", {}, make("h1", {}, (title ? `${title}: ` : "") + capture.file));
    const gpus = new Map();
    for (const name of facts.gpus) gpus.set(name, (gpus.get(name) || 0) + 1);
    const parts = facts.processes.map((p) => `${p.name} (pid ${p.pid})`);
    if (parts.length > 4) parts.splice(4, Infinity, `and ${facts.processes.length - 4} more`);
    parts.push(...[...gpus].map(([name, n]) => name + (n > 1 ? ` × ${n}` : "")));
    if (facts.exporter) parts.push(`nsys ${facts.exporter}`);
    parts.push(...Object.entries(facts.counts).filter(([, n]) => n).map(([noun, n]) => `${n.toLocaleString("en")} ${n === 1 ? noun.replace("copies", "copy").replace(/s$/, "") : noun}`));
    box.append(make("p", { class: "quiet" }, parts.join(" · ")));
    facts.devices.slice(0, 8).forEach((device) => {
      const list = make("dl", { class: "facts" });
      if (facts.devices.length > 1) list.append(fact("device", device.name));
      list.append(fact("GPU span", duration(device.span_ns)));
      const words = { any: ["GPU busy", "kernel"], compute: ["compute busy", "kernel"], HtoD: ["HtoD busy", "HtoD"], DtoH: ["DtoH busy", "DtoH"] };
      for (const [name, ns] of Object.entries(device.busy_ns)) {
        const share = Math.min(1, ns / Math.max(1, device.span_ns));
        list.append(fact(words[name][0], percent(share), duration(ns), share, words[name][1]));
      }
      for (const [cause, ns] of Object.entries(device.idle_ns)) {
        const share = ns / Math.max(1, device.span_ns);
        if (share >= 0.0005) list.append(fact(WORDS[cause], percent(share), duration(ns), share, cause));
      }
      if (facts.devices.length === 1) modelFacts(list, capture);
      box.append(list);
    });
    if (facts.devices.length !== 1) {
      const list = make("dl", { class: "facts" });
      modelFacts(list, capture);
      if (list.children.length) box.append(list);
    }
    if (facts.devices.length > 8) box.append(make("p", { class: "quiet" }, `and ${facts.devices.length - 8} more devices`));
    return box;
  }
  function modelFacts(list, capture) {
    const model = capture.facts.model;
    const unable = capture.not_assessed.length;
    if (unable) list.append(fact("not assessed", make("a", { href: "#unjudged" }, counted(unable, "rule"))));
    if (!model) return;
    list.append(fact("replay error", `${model.error >= 0 ? "+" : "−"}${percent(Math.abs(model.error))}`, "of the GPU span"));
    if (model.joint_ns !== null) list.append(fact(`all ${model.fixes} what-if fixes`, `save ${duration(model.joint_ns)}`, percent(model.joint_share)));
  }
  function unjudged() {
    const box = byId("unjudged");
    data.captures.forEach((capture, i) => {
      const name = compared ? ` (${i ? "after" : "before"})` : "";
      const groups = grouped(capture.not_assessed, (one) => JSON.stringify([one.reason, one.recapture]));
      if (groups.size) {
        const body = make("tbody");
        for (const all of groups.values()) {
          const [{ reason, recapture }] = all;
          const rules = all.map((one) => one.rule);
          const names = rules.length > 4 ? make("details", {}, make("summary", {}, counted(rules.length, "rule")), rules.join(", ")) : rules.join(", ");
          body.append(make("tr", {}, make("td", {}, names), make("td", {}, reason), make("td", {}, recapture)));
        }
        const head = make("thead", {}, make("tr", {}, ...["Rules", "Why", "What would show it"].map((t) => make("th", { scope: "col" }, t))));
        box.append(make("h2", {}, `Not assessed${name}: ${capture.not_assessed.length}`), make("div", { class: "scroll" }, make("table", {}, head, body)));
      }
      for (const { rule, origin, summary } of capture.crashed) box.append(make("p", { class: "error" }, `Crashed${name}: ${rule}: ${summary}; this is a bug in ${origin}, please report it`));
      const { silent, suppressed, below } = capture.facts;
      const hidden = [suppressed && `${counted(suppressed, "finding")} suppressed`, below && `${counted(below, "finding")} below min-saving`].filter(Boolean);
      box.append(make("p", { class: "quiet" }, `${[`${counted(silent, "rule")} found nothing`, ...hidden].join("; ")}${name}.`));
    });
  }
  function notes() {
    const found = [];
    for (const capture of data.captures) {
      const held = capture.lanes.reduce((sum, lane) => sum + lane.n, 0);
      if (held < capture.intervals) found.push(`${capture.file}: this page holds ${held.toLocaleString("en")} of ${capture.intervals.toLocaleString("en")} intervals, around the findings; elsewhere the exact busy time of every ${duration(capture.bin_ns)}.`);
      const merged = capture.lanes.reduce((sum, lane) => sum + lane.merged, 0);
      if (merged) found.push(`${capture.file}: ${counted(merged, "interval")} that overlap too deeply are drawn merged.`);
      for (const [table, n] of Object.entries(capture.facts.dropped)) found.push(`${capture.file}: ${counted(n, "row")} of ${table} without usable times left out.`);
      const skipped = capture.changes - capture.replays.length;
      if (skipped) found.push(`${capture.file}: ${counted(skipped, "cheap finding")} without a replayed schedule: this trace is large.`);
      if (capture.replays.some((r) => r.overview)) found.push(`${capture.file}: some replayed schedules are held as overviews only.`);
    }
    byId("notes").textContent = found.join(" ");
  }
  function legend() {
    const used = new Set();
    for (const capture of data.captures) for (const kind of capture.about.kinds) used.add(kind);
    byId("legend").replaceChildren(...KINDS.flatMap((kind, k) => {
      if (!used.has(k)) return [];
      const item = make("span", {}, WORDS[kind]);
      item.style.setProperty("--swatch", `var(--${kind === "mark" ? "mark-nvtx" : kind})`);
      return [item];
    }));
  }
  function tools() {
    const button = (text, label, action, id) => make("button", { type: "button", "aria-label": label, title: label, id: id || null, on: action }, text);
    const box = byId("tools");
    box.append(
      button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)),
      button("◀", "Earlier", () => pan(-0.4)), button("▶", "Later", () => pan(0.4)),
      button("GPU work", "Show all GPU work", overview), button("Whole capture", "Show the whole capture", () => show(...everything())),
      button("Evidence", "Show the evidence of the chosen finding", evidenceView, "evidence"),
      button("Saving", "Show before and after with the saving", savingView, "savings"),
      make("span", { class: "gap" }),
    );
    byId("evidence").disabled = true;
    byId("savings").disabled = !compared;
    for (const [group, words] of Object.entries(GROUPS)) {
      if (!data.captures.some((c) => c.lanes.some((lane) => lane.group === group && lane.all))) continue;
      const check = make("input", { type: "checkbox", checked: true });
      check.addEventListener("change", () => { shown[group] = check.checked; rebuildRows(); draw(); });
      box.append(make("label", {}, check, words));
    }
    if (data.captures.reduce((sum, c) => sum + c.lanes.length, 0) > MAX_ROWS - 20) {
      const check = make("input", { type: "checkbox" });
      check.addEventListener("change", () => { state.all = check.checked; rebuildRows(); draw(); });
      box.append(make("label", {}, check, "all rows"));
    }
  }

  // Dragging chooses a part of the time axis; with Shift it moves it.
  function drag(event) {
    const box = plot.getBoundingClientRect();
    const inner = box.width - SIDE - EDGE;
    const place = (e) => Math.min(1, Math.max(0, (e.clientX - box.left - SIDE) / inner));
    if (event.button || event.clientX < box.left + SIDE) return;
    event.preventDefault();
    plot.focus({ preventScroll: true });
    const from = place(event), view = state.view, moving = event.shiftKey;
    const time = (share) => view[0] + share * (view[1] - view[0]);
    const band = byId("band");
    let frame = 0;
    const move = (e) => {
      const to = place(e);
      if (moving) {
        const by = (from - to) * (view[1] - view[0]);
        cancelAnimationFrame(frame);
        frame = requestAnimationFrame(() => show(view[0] + by, view[1] + by));
        return;
      }
      band.hidden = false;
      band.style.left = `${box.left + SIDE + Math.min(from, to) * inner}px`;
      band.style.width = `${Math.abs(to - from) * inner}px`;
      band.style.top = `${box.top + AXIS}px`;
      band.style.height = `${box.height - AXIS}px`;
    };
    const end = (e) => {
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", end);
      band.hidden = true;
      const to = place(e);
      if (!moving && Math.abs(to - from) * inner > 4) show(time(Math.min(from, to)), time(Math.max(from, to)));
    };
    addEventListener("mousemove", move);
    addEventListener("mouseup", end);
  }

  function listen() {
    plot.on("plotly_relayout", (change) => {
      const [a, b] = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (Number.isFinite(a) && Number.isFinite(b) && (a !== state.view[0] || b !== state.view[1])) show(a, b);
    });
    plot.addEventListener("dblclick", overview);
    plot.addEventListener("mousedown", drag);
    plot.addEventListener("mousemove", showTip);
    plot.addEventListener("mouseleave", () => { tip.hidden = true; });
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.altKey) return;
      event.preventDefault();
      const box = plot.getBoundingClientRect();
      const at = (event.clientX - box.left - SIDE) / (box.width - SIDE - EDGE);
      zoom(event.deltaY > 0 ? 1.4 : 1 / 1.4, Math.min(1, Math.max(0, at)));
    }, { passive: false });
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const action = {
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.25),
        ArrowRight: () => pan(0.25), 0: overview, e: evidenceView, E: evidenceView,
      }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    });
    byId("list").addEventListener("toggle", () => { if (byId("list").open) listView(); });
    let waiting = null;
    addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 100); });
    const redraw = () => { readColours(); draw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    matchMedia("print").addEventListener("change", redraw);
  }

  async function start() {
    byId("head").append(make("div", { class: "captures" }, ...data.captures.map((c, i) => headOf(c, compared ? (i ? "After" : "Before") : ""))));
    unjudged();
    await decode();
    collect();
    findingsTable();
    tools();
    legend();
    notes();
    readColours();
    rebuildRows();
    if (rows.length) {
      state.view = wholeWork();
      await draw();
      listen();
    } else {
      byId("view").textContent = "The trace holds nothing to draw.";
      for (const id of ["tools", "stage", "keys", "list"]) byId(id).hidden = true;
    }
    document.documentElement.dataset.ready = String(performance.now());
    document.documentElement.dataset.script = String(performance.now() - began);
  }
  start().catch((error) => {
    byId("view").textContent = `The timeline could not be drawn: ${error.message}`;
    throw error;
  });
})();
