"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const ROW = 22;
  const NARROWEST = 14;
  const MAX_TICKS = 40;
  const byId = (id) => document.getElementById(id);
  const ranks = data.ranks;
  const every = ranks.map((_, index) => index);

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name === "on") element.addEventListener("click", value);
      else element.setAttribute(name, value);
    }
    for (const child of children) if (child !== null) element.append(child);
    return element;
  }

  // Plotly reads a little markup in its texts: names must come through as they are.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text, length) => (text.length > length ? `…${text.slice(1 - length)}` : text);

  function duration(ns) {
    for (const [unit, factor] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]]) {
      if (ns >= 0.9995 * factor) {
        const value = ns / factor;
        return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
      }
    }
    return `${ns} ns`;
  }

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const color = (level) => ({
    nothing: style("panel"), "not assessed": style("merged"), "no result": style("mark"),
    info: style("idle-queued"), low: style("kernel"), medium: style("HtoD"),
    high: style("wait"), error: style("DtoH"),
  })[level];

  function ticks() {
    const step = Math.max(1, Math.ceil(ranks.length / MAX_TICKS));
    const shown = every.filter((index) => index % step === 0);
    const text = shown.map((index) => plain(cut(ranks[index].label.replace(/^rank /, ""), 24)));
    return { tickmode: "array", tickvals: shown, ticktext: text, title: { text: data.noun } };
  }

  function layout(more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("ink"), size: 12 }, hovermode: "closest",
      hoverlabel: { bgcolor: style("panel"), font: { color: style("ink") }, align: "left" },
      ...more,
    };
  }
  const config = { displayModeBar: false, responsive: true, scrollZoom: false };

  function head() {
    const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    const judged = ranks.length - data.unassessed.length;
    const facts = [fact(`${data.noun} assessed`, `${judged} of ${ranks.length}`),
      fact("different findings", `${data.groups.length}`)];
    if (data.span) {
      facts.push(fact("GPU span, median", duration(data.span[1])));
      facts.push(fact("GPU span, spread", `${duration(data.span[0])} to ${duration(data.span[2])}`));
    }
    byId("head").append(make("h1", {}, `${ranks.length} ${data.noun}`), make("dl", { class: "facts" }, ...facts));
  }

  function findings() {
    const table = make("table", {}, make("thead", {}, make("tr", {},
      ...["severity", "rule", `on which ${data.noun}`, "cost"].map((name) => make("th", { scope: "col" }, name)))));
    const body = make("tbody");
    data.groups.forEach((group, index) => {
      const button = make("button", { type: "button", "aria-pressed": "false", on: () => choose(index) }, group.rule);
      body.append(make("tr", {},
        make("td", {}, make("span", { class: `severity ${group.severity}` }, group.severity)),
        make("td", {}, button), make("td", {}, group.on), make("td", {}, group.cost)));
    });
    table.append(body);
    byId("findings-table").append(data.groups.length ? table : make("p", { class: "quiet" }, "No findings."));
  }

  function choose(number) {
    const group = data.groups[number];
    byId("findings-table").querySelectorAll("tbody tr").forEach((row, index) => {
      row.classList.toggle("chosen", index === number);
      row.querySelector("button").setAttribute("aria-pressed", `${index === number}`);
    });
    const place = byId("chosen");
    place.hidden = false;
    place.replaceChildren(
      make("h3", { id: "chosen-title" }, `${group.rule}: ${group.on}`),
      make("p", {}, `${group.of}: ${group.what}`), make("p", {}, `Fix: ${group.fix}`));
    if (group.costs.length > 1) {
      const plot = make("div", { role: "img", "aria-label": `cost by rank: ${group.cost}` });
      place.append(make("p", { class: "quiet" }, `Cost by rank: ${group.cost}. Costs of ranks do not add up.`), plot);
      bars(plot, group.costs.map(([index]) => index), group.costs.map(([, ns]) => ns), style("wait"));
    }
    document.documentElement.dataset.chosen = `${number}`;
  }

  function bars(place, indexes, values, fill, above = null) {
    const trace = {
      type: "bar", x: indexes, y: values.map((ns) => ns / 1e6),
      marker: { color: indexes.map((index) => (above && above.has(index) ? style("wait") : fill)), line: { width: 0 } },
      text: indexes.map((index, i) => plain(`${ranks[index].label}: ${duration(values[i])}`)),
      textposition: "none", hovertemplate: "%{text}<extra></extra>",
    };
    Plotly.newPlot(place, [trace], layout({
      height: 240, margin: { l: 60, r: 10, t: 10, b: 60 }, bargap: ranks.length > 100 ? 0 : 0.2,
      xaxis: { ...ticks(), range: [-0.5, ranks.length - 0.5], showgrid: false, zeroline: false },
      yaxis: { title: { text: "ms" }, rangemode: "tozero", gridcolor: style("grid") },
    }), config);
  }

  function map() {
    const shown = data.rules.map((rule, row) => ({ rule, cells: data.map[row] }))
      .filter(({ cells }) => cells.some((cell) => cell > data.levels.indexOf("no result")));
    const seen = new Set(shown.flatMap(({ cells }) => cells));
    byId("legend").append(...data.levels.flatMap((level, index) => {
      if (!seen.has(index)) return [];
      const item = make("span", {}, level);
      item.style.setProperty("--swatch", color(level));
      return [item];
    }));
    if (!shown.length) {
      byId("map").append(make("p", { class: "quiet" }, "No rule has findings."));
      return;
    }
    const last = data.levels.length - 1;
    const scale = data.levels.flatMap((level, index) => [
      [index / (last + 1), color(level)], [(index + 1) / (last + 1), color(level)]]);
    const rows = [...shown].reverse();
    const trace = {
      type: "heatmap", x: every, y: rows.map((_, index) => index), z: rows.map(({ cells }) => cells),
      zmin: -0.5, zmax: last + 0.5, colorscale: scale, showscale: false,
      xgap: ranks.length > 80 ? 0 : 1, ygap: 1,
      text: rows.map(({ rule, cells }) => cells.map((cell, index) =>
        plain(`${rule}, ${ranks[index].label}: ${data.levels[cell]}`))),
      hovertemplate: "%{text}<extra></extra>",
    };
    const place = byId("map");
    const most = Math.max(...rows.map(({ rule }) => rule.length));
    Plotly.newPlot(place, [trace], layout({
      height: ROW * rows.length + 90,
      margin: { l: 7.2 * most + 20, r: 10, t: 10, b: 70 },
      xaxis: { ...ticks(), showgrid: false, zeroline: false },
      yaxis: {
        tickmode: "array", tickvals: rows.map((_, index) => index),
        ticktext: rows.map(({ rule }) => plain(rule)), showgrid: false, zeroline: false,
      },
    }), config);
    place.dataset.rows = `${rows.length}`;
    const counts = make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "rule"),
      ...data.levels.map((level) => make("th", { scope: "col", class: "number" }, level)))));
    const body = make("tbody");
    data.rules.forEach((rule, row) => {
      const count = (level) => data.map[row].filter((cell) => cell === level).length || "";
      body.append(make("tr", {}, make("th", { scope: "row" }, rule),
        ...data.levels.map((_, level) => make("td", { class: "number" }, `${count(level)}`))));
    });
    counts.append(body);
    byId("counts").lastElementChild.append(counts);
  }

  function spans() {
    const there = every.filter((index) => ranks[index].span !== null);
    if (!there.length) {
      byId("span-words").append("No trace has GPU work.");
      return;
    }
    const slow = new Set(data.slowest);
    const words = data.slowest.map((index) => `${ranks[index].label} (${duration(ranks[index].span)})`);
    const slowest = words.length ? `Slowest: ${words.join(", ")}.` : "None stands out.";
    byId("span-words").append(`${slowest} Ranks that wait for others span as long as they do.`);
    bars(byId("span"), there, there.map((index) => ranks[index].span), style("kernel"), slow);
  }

  function unjudged() {
    if (!data.unassessed.length) return;
    byId("unjudged").append(make("h2", {}, "Without a result"), make("ul", {},
      ...data.unassessed.map((index) => make("li", {}, `${ranks[index].label} (${ranks[index].file}): ${ranks[index].status}`))));
  }

  head();
  findings();
  map();
  spans();
  unjudged();
  if (data.groups.length) choose(0);
  document.documentElement.dataset.ready = "";
})();
