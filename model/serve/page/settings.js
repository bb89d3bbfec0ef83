"use strict";
// What is asked of a model beside the question: only what is typed here is sent, the rest is as the model has it.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size", "max_tokens", "seed"];
const WHOLE = ["top_k", "no_repeat_ngram_size", "max_tokens", "seed", "earlier"];
const stored = { ...read("localStorage", "settings", {}) }; // another page of this address may have kept anything there

function setUpSettings() {
  const rows = [wideRow("system", made("textarea", { rows: 2 }))];
  if (served.needsKey) rows.unshift(wideRow("key", made("input", { type: "password", autocomplete: "off" })));
  for (const name of NUMBERS) rows.push(numberRow(name, limitsOf(name), inForce(name)));
  rows.push(numberRow("earlier", [0, 10000], words.every));
  rows.push(choiceRow("thinking", { "": words.thinking_default, on: words.thinking_on, off: words.thinking_off }));
  rows.push(choiceRow("language", { "": words.language_auto, en: "English", zh: "中文" }));
  byId("options").replaceChildren(...rows);
  byId("option_language").addEventListener("input", () => location.reload());
  if (served.models.every((model) => model.single_turn)) {
    const earlier = Object.assign(byId("option_earlier"), { value: 0, disabled: true });
    earlier.closest("label").querySelector("small").textContent = words.single;
  }
}

function limitsOf(name) {
  return served.models[0].limits[name].map((limit) => Math.min(limit, Number.MAX_SAFE_INTEGER));
}

/** The value that a model answers with where nothing is typed; of several models each. */
function inForce(name) {
  const values = served.models.map((model) => model.defaults[name] ?? words.random);
  return [...new Set(values)].join(" / ");
}

function remember(name, value) {
  stored[name] = value;
  if (!write("localStorage", "settings", stored)) tell(words.full);
}

function wideRow(name, input) {
  Object.assign(input, { id: "option_" + name, value: stored[name] ?? "" });
  input.addEventListener("input", () => remember(name, input.value));
  return made("label", { className: "wide" }, words[name], input);
}

function numberRow(name, [least, most], placeholder) {
  const input = made("input", { id: "option_" + name, type: "number", min: least, max: most, placeholder, value: stored[name] ?? "" });
  input.step = WHOLE.includes(name) ? 1 : "any";
  input.inputMode = WHOLE.includes(name) ? "numeric" : "decimal";
  const hint = made("small", {});
  const row = made("label", {}, made("span", {}, words[name], hint), input);
  const check = () => {
    row.classList.toggle("wrong", !input.validity.valid);
    hint.textContent = say(input.validity.valid ? words.range : words.wrong, { least, most });
  };
  input.addEventListener("input", () => {
    check();
    if (input.validity.valid) remember(name, input.value);
  });
  check();
  return row;
}

function choiceRow(name, choices) {
  const select = made("select", { id: "option_" + name }, ...Object.entries(choices).map(([value, text]) => new Option(text, value)));
  select.value = stored[name] ?? "";
  select.addEventListener("input", () => remember(name, select.value));
  return made("label", {}, words[name], select);
}

function resetSettings() {
  for (const name of [...NUMBERS, "earlier", "thinking"]) remember(name, "");
  setUpSettings();
}

function headers() {
  return { "Content-Type": "application/json", ...(stored.key ? { Authorization: "Bearer " + stored.key } : {}) };
}

/** The body of a request to the model `name` for the answer of a round. */
function requestOf(talk, round, name, seed) {
  const model = served.models.find((one) => one.id === name);
  const messages = messagesFor(talk, round, name, model.single_turn ? "0" : stored.earlier);
  if (stored.system) messages.unshift({ role: "system", content: stored.system });
  const body = { model: name, messages, stream: true, stream_options: { include_usage: true }, tool_choice: "auto", seed };
  if (stored.thinking) body.enable_thinking = stored.thinking === "on";
  for (const option of NUMBERS) if ((stored[option] ?? "") !== "") body[option] = Number(stored[option]);
  return body;
}

/** The newest `earlier` rounds before this one that the model has answered, "" for all of them, and its question. */
function messagesFor(talk, round, name, earlier) {
  const before = talk.rounds.slice(0, talk.rounds.indexOf(round)).filter((one) => saysSomething(answerOf(one, name)));
  const kept = (earlier ?? "") === "" ? before : before.slice(Math.max(0, before.length - Number(earlier)));
  const said = kept.flatMap((one) => [{ role: "user", content: one.question }, messageOf(answerOf(one, name))]);
  return [...said, { role: "user", content: round.question }];
}

function answerOf(round, name) {
  return round.answers[name] ?? Object.values(round.answers)[0]; // of a model that this server lacks
}

function saysSomething(answer) {
  return Boolean(answer && (answer.content || answer.tool_calls));
}

function messageOf({ content, reasoning_content, tool_calls }) {
  return { role: "assistant", content, ...(reasoning_content ? { reasoning_content } : {}), ...(tool_calls ? { tool_calls } : {}) };
}
