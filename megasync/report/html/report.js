// Draws curves with plotly as they come into view, and tokens with their colours. No network. Data is in two JSON elements,
// `curves` and `tokens`; colours are the variables of report.css.
"use strict";
const read = id => JSON.parse(document.getElementById(id).textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const figures = [];                                                  // [element, chart] of those that are drawn

// ------------------------------------------------------------------------------------------------------- curves
function smooth(values) {
  const half = Math.max(2, Math.round(values.length / 50));
  return values.map((_, at) => {
    const part = values.slice(Math.max(0, at - half), at + half + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

function lookOf(chart, curve) {                                      // one run: a colour a metric; several: a colour a run
  const keys = [...new Set(chart.curves.map(each => each.key))], place = keys.indexOf(curve.key);
  return curve.name ? {colour: `--c${curve.run % 8}`, dash: ["solid", "dot", "dash", "dashdot"][place % 4]}
                    : {colour: `--c${place % 9}`, dash: "solid"};
}

function traces(chart) {
  return chart.curves.flatMap(curve => {
    const look = lookOf(chart, curve), colour = css(look.colour), many = curve.x.length >= 40 && !curve.evaluated;
    const base = {x: curve.x, type: "scatter", mode: curve.x.length < 30 || curve.evaluated ? "lines+markers" : "lines",
                  name: curve.name ? `${curve.label}, ${curve.name}` : curve.label, marker: {size: 6, color: colour}};
    const line = {color: colour, width: 2, dash: look.dash};
    if (!many) return [{...base, y: curve.y, line}];
    const faint = {...base, y: curve.y, line: {...line, width: 1}, opacity: 0.32};
    return [faint, {...base, y: smooth(curve.y), line, hoverinfo: "skip"}];
  });
}

function layout(chart) {
  const axis = {gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, tickfont: {size: 11}, fixedrange: true};
  return {
    margin: {l: 50, r: 10, t: 10, b: 34}, showlegend: false, hovermode: "x unified", dragmode: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: css("--muted"), family: "system-ui, sans-serif"},
    hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--text"), size: 12}},
    xaxis: {...axis, title: {text: "step", font: {size: 11}, standoff: 4}, tickformat: "d"},
    yaxis: {...axis, type: chart.log ? "log" : "linear", title: {text: chart.unit, font: {size: 11}, standoff: 4},
            tickformat: chart.unit === "share" ? ".1~%" : undefined, exponentformat: "power", minexponent: 4,
            dtick: chart.log ? 1 : undefined, nticks: 6, automargin: true},
  };
}

function legend(chart) {                                             // of several runs: colours are runs, dashes metrics
  const list = document.createElement("ul"), curves = chart.curves, first = (each, at, name) =>
    curves.findIndex(other => other[name] === each[name]) === at;
  const add = (text, colour, dash) => {
    const item = list.appendChild(document.createElement("li")), mark = item.appendChild(document.createElement("i"));
    mark.style.borderTopColor = `var(${colour})`;
    mark.style.borderTopStyle = {solid: "solid", dot: "dotted"}[dash] || "dashed";
    item.append(text);
  };
  if (!curves[0].name) {
    const shown = curves.length > 1 || curves[0].label !== chart.title ? curves : [];
    shown.forEach(each => add(each.label, lookOf(chart, each).colour, "solid"));
    return list;
  }
  curves.filter((each, at) => first(each, at, "run")).forEach(each => add(each.name, lookOf(chart, each).colour, "solid"));
  const metrics = curves.filter((each, at) => first(each, at, "key"));
  if (metrics.length > 1) metrics.forEach(each => add(each.label, "--muted", lookOf(chart, each).dash));
  return list;
}

function build(holder, chart) {
  const add = (tag, text) => { const it = holder.appendChild(document.createElement(tag)); it.textContent = text; return it; };
  holder.className = "chart";
  add("h4", chart.title);
  add("p", chart.sentence);
  holder.append(legend(chart));
  const plot = add("div", "");
  plot.className = "plot";
  return plot;
}

const draw = (plot, chart) => Plotly.react(plot, traces(chart), layout(chart), {displayModeBar: false, responsive: true});
const seen = new IntersectionObserver(entries => entries.filter(each => each.isIntersecting).forEach(each => {
  seen.unobserve(each.target);
  figures.push([each.target, each.target.chart]);
  draw(each.target, each.target.chart);
}), {rootMargin: "300px"});
for (const [group, charts] of Object.entries(read("curves"))) {
  for (const chart of charts) {
    const plot = build(document.getElementById(`charts-${group}`).appendChild(document.createElement("div")), chart);
    plot.chart = chart;
    seen.observe(plot);
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach(each => draw(...each)));

// ------------------------------------------------------------------------------------------------------- tokens
const samples = read("tokens"), drawn = [];
for (const sample of samples) {
  const trainer = sample.trainer_log_probs || [], rollout = sample.rollout_log_probs || [];
  sample.gaps = rollout.map((value, at) => trainer[at] == null || value == null ? null : trainer[at] - value);
  sample.versions = (sample.version_runs || []).flatMap(([version, number]) => Array(number).fill(version));
}
const sizes = samples.flatMap(sample => sample.gaps).filter(gap => gap != null).map(Math.abs).sort((a, b) => a - b);
const largest = Math.max(0.02, sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] : 0);
const digits = value => value == null ? "-" : value.toFixed(4);

function shade(sample, at, by) {                                      // [colour variable, strength from 0 to 1]
  if (by === "gap" && sample.gaps[at] != null) {
    return [sample.gaps[at] > 0 ? "--up" : "--down", Math.sqrt(Math.min(1, Math.abs(sample.gaps[at]) / largest))];
  }
  if (by === "version" && sample.versions.length) {
    const span = sample.version_span && sample.version_span.length ? sample.version_span : sample.versions;
    const newest = Math.max(...span), oldest = Math.min(...span);
    return ["--age", newest === oldest ? 0 : (newest - sample.versions[at]) / (newest - oldest)];
  }
  const value = (sample.rollout_log_probs || [])[at];
  return by === "probability" && value != null ? ["--sure", 1 - Math.exp(value)] : ["--up", 0];
}

const background = ([colour, strength]) => strength > 0.02 ? `rgba(var(${colour}), ${(0.6 * strength).toFixed(3)})` : "";

function showFigures(sample, at) {
  const text = JSON.stringify(sample.token_texts[at]), gap = sample.gaps[at];
  const parts = [`token ${at + 1} of ${sample.token_texts.length} ${text}`, `vLLM ${digits(sample.rollout_log_probs[at])}`];
  if (gap != null) parts.push(`trainer ${digits(sample.trainer_log_probs[at])}`, `gap ${digits(gap)} nats`);
  parts.push(`version ${sample.versions[at]}`);
  document.querySelectorAll(".token-figures").forEach(each => { each.textContent = parts.join(" · "); });
}

document.querySelectorAll("pre[data-tokens]").forEach(holder => {
  const sample = samples[Number(holder.dataset.tokens)];
  holder.textContent = "";
  sample.token_texts.forEach((text, at) => {
    const token = holder.appendChild(document.createElement("span"));
    token.className = /^<[^ ]*>$/.test(text) ? "t special" : "t";
    token.textContent = text;
    token.addEventListener("pointerenter", () => showFigures(sample, at));
    token.addEventListener("click", () => showFigures(sample, at));
    drawn.push([token, sample, at]);
  });
});

function scale(by) {
  const swatch = (colour, strength, text) =>
    `<span class="swatch" style="background:${background([colour, strength])}">${text}</span>`;
  const less = swatch("--down", 1, `-${largest.toPrecision(2)}`), more = swatch("--up", 1, `+${largest.toPrecision(2)}`);
  return {
    gap: `${less}trainer less sure ${swatch("--up", 0, "0")} more sure${more} nats`,
    version: `${swatch("--age", 0, "newest")}${swatch("--age", 1, "oldest")} of the response`,
    probability: `${swatch("--sure", 0, "certain")}${swatch("--sure", 1, "unlikely")} when it was sampled`,
  }[by] || "";
}

function colour(by) {
  for (const [token, sample, at] of drawn) token.style.background = background(shade(sample, at, by));
  document.querySelectorAll(".legend").forEach(each => {
    each.querySelector(".scale").innerHTML = scale(by);
    each.querySelectorAll("button").forEach(button => button.setAttribute("aria-pressed", String(button.dataset.by === by)));
  });
}
document.querySelectorAll(".legend button").forEach(each => each.addEventListener("click", () => colour(each.dataset.by)));
colour(sizes.length && sizes[sizes.length - 1] > 0.001 ? "gap" : "probability");   // in float32 there are no gaps to see

// ------------------------------------------------------------------------------------------------------- watch
if (document.body.dataset.state) setInterval(async () => {            // served by --watch: reload once the run has new steps
  try {
    const answer = await fetch("/state", {cache: "no-store"});
    if (answer.ok && (await answer.text()) !== document.body.dataset.state) location.reload();
  } catch (error) { document.title = "(not running) " + document.title.replace(/^\(not running\) /, ""); }
}, 3000);
