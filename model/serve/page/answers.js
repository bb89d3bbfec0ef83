"use strict";
// Answers as they come: asked for, read from the stream, stopped, gone on with after a refresh.

const LOOK_MILLISECONDS = 2000; // between two looks whether the server is there again
const LEAVE_MILLISECONDS = 500; // in which a page that is left is gone: it loses its connections first
const running = new Map(); // answer to { talk, stop }
const before = new WeakMap(); // answer that is gone on with to what it said before the refresh
let isWatching = false;

class Refusal extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

function isAnswering(talk) {
  return [...running.values()].some((one) => one.talk === talk);
}

function stopAnswers(talk) {
  for (const one of running.values()) if (one.talk === talk) one.stop.abort();
}

/** Ask the models `names` for their answers to the question of a round. */
function askModels(talk, round, names) {
  for (const name of names) answer(talk, round, name, newSeed(), round.answers[name]);
  keepTalk(talk);
  if (talk === current) show(Math.max(0, talk.rounds.indexOf(round) - 1)); // the one before is no longer the last
}

function newSeed() {
  return Math.floor(Math.random() * 2 ** 31);
}

async function answer(talk, round, name, seed, earlier) {
  const started = performance.now(), stop = new AbortController();
  const reply = { content: "", state: "open", seed };
  round.answers[name] = reply;
  running.set(reply, { talk, stop });
  if (earlier?.state === "open" && earlier.seed === seed) before.set(reply, earlier.content);
  noteRunning();
  try {
    const usage = await receive(requestOf(talk, round, name, seed), reply, stop.signal, () => { saveSoon(talk); refresh(reply); });
    const isSame = earlier?.state === "done" && earlier.content === reply.content && !temperatureOf(name);
    Object.assign(reply, { state: "done", tokens: usage?.completion_tokens, seconds: (performance.now() - started) / 1000, isSame });
  } catch (error) {
    const isLost = !(error instanceof Refusal) && error.name !== "AbortError";
    if (isLost) await new Promise((resolve) => setTimeout(resolve, LEAVE_MILLISECONDS));
    reply.state = error.name === "AbortError" ? "stopped" : "failed";
    if (reply.state === "failed") Object.assign(reply, { status: error.status ?? 0, reason: error.message });
    if (!reply.content || before.get(reply)?.startsWith(reply.content)) reply.content = earlier?.content ?? ""; // it stays
    if (reply.status === 0) watchServer();
  }
  running.delete(reply);
  noteRunning();
  saveTalk(talk);
  showList();
  if (talk === current) showEnd(reply);
}

function temperatureOf(name) {
  const typed = stored.temperature ?? "", model = served.models.find((one) => one.id === name);
  const isFiltered = ["top_p", "top_k", "min_p"].some((option) => (stored[option] ?? "") !== ""); // which draws, too
  return typed === "" ? model.defaults.temperature || Number(isFiltered) : Number(typed);
}

/** Read the stream of an answer into `reply`; its usage. Raises a Refusal of the server, and TypeError if it is gone. */
async function receive(body, reply, signal, show) {
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw new Refusal(response.status, (await response.json().catch(() => ({}))).error?.message ?? response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", usage;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the stream has ended too early");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return usage;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Refusal(503, parsed.error.message);
      usage = parsed.usage ?? usage;
      if (parsed.choices[0]) addPiece(reply, parsed.choices[0]);
    }
    show();
  }
}

function addPiece(reply, { delta, finish_reason }) {
  reply.content += delta.content ?? "";
  if (delta.reasoning_content) reply.reasoning_content = (reply.reasoning_content ?? "") + delta.reasoning_content;
  for (const { index, ...call } of delta.tool_calls ?? []) reply.tool_calls = [...(reply.tool_calls ?? []), call];
  reply.finish = finish_reason ?? reply.finish;
}

/** What went wrong with an answer, in words with what to do, "" if nothing did. */
function problemOf(reply, isRunning) {
  const { state, status, reason, finish, tokens, isSame } = reply;
  if (isRunning) return "";
  if (state === "stopped") return words.stopped;
  if (state === "open") return words.cut;
  if (state === "failed") return status ? say(words["refused_" + status] || words.refused, { reason }) : words.broken;
  if (finish === "length") return say(words.length, { tokens });
  if (!saysSomething(reply)) return words.nothing;
  return isSame ? words.same : "";
}

// This tab's answers that are under way: after a refresh it asks for them again with their seeds, which gives the same.
function noteRunning() {
  write("sessionStorage", "answering", [...new Set([...running.values()].map(({ talk }) => talk.id))]);
}

function goOn() {
  for (const talk of [read("sessionStorage", "answering", [])].flat().map((id) => talks.get(id)).filter(Boolean)) {
    const round = talk.rounds.at(-1);
    for (const [name, reply] of Object.entries(round?.answers ?? {})) {
      const isServed = served.models.some((model) => model.id === name);
      if (reply.state === "open" && isServed) answer(talk, round, name, reply.seed, reply);
    }
  }
}

/** Say when a server that is gone answers again. */
async function watchServer() {
  if (isWatching) return;
  isWatching = true;
  tell(words.lost, "", null, true);
  do await new Promise((resolve) => setTimeout(resolve, LOOK_MILLISECONDS));
  while (!(await fetch("health").catch(() => null))?.ok);
  isWatching = false;
  const found = await fetch("v1/models", { headers: headers() }).then((response) => response.json()).catch(() => ({}));
  if (found.data && JSON.stringify(found.data) !== JSON.stringify(served.models)) {
    tell(words.changed, words.reload, () => location.reload(), true);
  } else tell(words.back);
}
