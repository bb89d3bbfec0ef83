"use strict";
// The panel of a run: its state and figures in words, the curves, what the model answers now, events and log.

const POLL_MILLISECONDS = 2000, SLOW_MILLISECONDS = 10000;
const MOST_TIMES = 20; // from the least to the greatest value so many times more: then the scale is logarithmic
let chosenRun = "", pollTimer = 0, shownRun = null;

async function followRun() {
  let wait = POLL_MILLISECONDS;
  try {
    if (!document.hidden) wait = await lookAtRun();
  } catch {
    byId("state").textContent = words.lost;
    wait = SLOW_MILLISECONDS;
  }
  clearTimeout(pollTimer);
  pollTimer = setTimeout(followRun, wait);
}

/** Show the run as it is; milliseconds until the next look. */
async function lookAtRun() {
  const query = new URLSearchParams({ run: chosenRun, language });
  const response = await fetch("run.json?" + query, { headers: headers() });
  const run = await response.json();
  if (!response.ok) {
    byId("state").textContent = say(words["refused_" + response.status] || words.refused, { reason: run.error?.message });
    return SLOW_MILLISECONDS;
  }
  showRun(run);
  return run.is_finished ? SLOW_MILLISECONDS : POLL_MILLISECONDS;
}

function showRun(run) {
  const select = byId("runs"), isOther = select.value !== run.run;
  update(select, run.runs.map((name) => made("option", { value: name }, name)));
  select.value = run.run;
  select.hidden = run.runs.length < 2;
  if (isOther) byId("run").scrollTop = 0;
  byId("state").textContent = [run.state, ...run.progress.slice(run.is_finished ? 1 : 0)].join(" · ");
  update(byId("figures"), run.rows.flatMap(([name, value]) => [made("dt", {}, name), made("dd", {}, value)]));
  shownRun = run;
  drawCurves();
  update(byId("devices"), run.devices[0]?.length > 1 ? run.devices.map(tableRow) : []);
  update(byId("samples"), run.samples.length ? [made("h2", {}, words.samples), ...run.samples.map(sampleBox)] : []);
  showLines("events", run.events);
  showLines("log", run.log);
  document.body.dataset.points = run.train.length;
}

function drawCurves() {
  if (!shownRun) return;
  const { train, eval: evaluated } = shownRun, last = train.at(-1);
  draw(byId("loss"), train.map((p) => [p.step, p.loss]), evaluated.map((p) => [p.step, p.loss]), false);
  draw(byId("speed"), train.map((p) => [p.step, p.tokens_per_second]), [], true);
  byId("loss").ariaLabel = `${words.loss}: ${last?.loss ?? ""}`;
  byId("speed").ariaLabel = `${words.speed}: ${last?.tokens_per_second ?? ""}`;
}

function tableRow(cells, place) {
  return made("tr", {}, ...cells.map((cell) => made(place ? "td" : "th", {}, cell)));
}

function sampleBox({ question, answer: said, reference }) {
  return made("div", { className: "sample" }, made("p", { className: "asked" }, question), made("p", {}, said),
    made("p", { className: "reference" }, say(words.reference, { reference })));
}

function showLines(id, lines) {
  const box = byId(id), pre = box.querySelector("pre"), isAtEnd = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 20;
  box.hidden = !lines.length;
  const text = lines.join("\n");
  if (pre.textContent !== text) pre.textContent = text;
  if (isAtEnd) pre.scrollTop = pre.scrollHeight;
}

/** Draw a line and dots, lists of [step, value], from zero or, on a logarithmic scale if need be, from the least on. */
function draw(canvas, lines, dots, fromZero) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim(), all = [...lines, ...dots].filter(([, y]) => y !== null);
  pen.scale(scale, scale);
  if (!all.length) return;
  const [left, bottom, top] = [46, 20, 8], most = Math.max(...all.map(([x]) => x), 1);
  let low = fromZero ? 0 : Math.min(...all.map(([, y]) => y)), high = Math.max(...all.map(([, y]) => y));
  if (high === low) { high += 1; low -= 1; }
  const isLog = low > 0 && high / low > MOST_TIMES, scaled = isLog ? Math.log : Number;
  const x = (value) => left + (width - left - 8) * value / most;
  const y = (value) => height - bottom - (height - bottom - top) * (scaled(value) - scaled(low)) / (scaled(high) - scaled(low));
  pen.font = "11px system-ui";
  pen.fillStyle = color("--soft");
  pen.strokeStyle = color("--line");
  for (const part of [0, 0.5, 1]) {
    const value = isLog ? low * (high / low) ** part : low + (high - low) * part;
    pen.fillText(shortNumber(value), 2, y(value) + 4);
    pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(width, y(value)); pen.stroke();
  }
  pen.fillText("0", left, height - 5);
  pen.textAlign = "right";
  pen.fillText((isLog ? words.log_scale + ", " : "") + say(words.step, { step: most }), width - 4, height - 5);
  pen.textAlign = "left";
  pen.strokeStyle = color("--accent");
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const [at, value] of lines) if (value !== null) pen.lineTo(x(at), y(value));
  pen.stroke();
  pen.fillStyle = color("--second");
  for (const [at, value] of dots) if (value !== null) { pen.beginPath(); pen.arc(x(at), y(value), 3.5, 0, 7); pen.fill(); }
}

function shortNumber(value) {
  if (value >= 1000) return (value / 1000).toFixed(1) + "k";
  return value ? value.toPrecision(value < 0.1 ? 2 : 3) : "0";
}

function setUpRun() {
  byId("run").hidden = byId("openRun").hidden = !served.hasRuns;
  if (!served.hasRuns) return;
  byId("runs").addEventListener("input", () => { chosenRun = byId("runs").value; followRun(); });
  byId("settings").addEventListener("close", followRun); // the key may have been typed
  addEventListener("visibilitychange", () => { if (!document.hidden) followRun(); });
  new ResizeObserver(drawCurves).observe(byId("loss")); // also when the panel opens
  followRun();
}
