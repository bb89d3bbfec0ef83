"use strict";
// The conversation that is open, and what the buttons and keys do.

const NOTICE_MILLISECONDS = 8000;
const isTouch = matchMedia("(pointer: coarse)").matches; // there Enter makes a new line, as on phones
const boxes = new WeakMap(); // answer to its box
const toShow = new Set(); // answers that have something new
let current = newTalk(), noticeTimer = 0;

function openTalk(talk) {
  current = talk;
  show();
  showList();
  byId("talk").scrollTop = byId("talk").scrollHeight;
  if (!isTouch) byId("question").focus();
}

/** Names of the models that are asked. */
function chosenModels() {
  const chosen = byId("models").value;
  return chosen ? [chosen] : served.models.map((model) => model.id);
}

/** Show the conversation; of one that is shown already only the rounds from a place on, as others may be hundreds. */
function show(from = 0) {
  const talk = byId("talk"), first = talk.querySelector(".edit") ? 0 : from; // behind an edited one others may be out of date
  const note = made("p", { className: "note" }, words.empty, served.models.every((model) => model.single_turn) ? " " + words.single : "");
  const added = current.rounds.slice(first).map((round, place) => roundBox(round, first + place));
  [...talk.children].slice(first).forEach((shown) => shown.remove());
  talk.append(...(current.rounds.length ? added : [note]));
  document.title = `${titleOf(current)} – ${served.models.map((model) => model.id).join(", ")}`;
  showButtons();
}

function showButtons() {
  const isBusy = isAnswering(current);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("talk").ariaBusy = String(isBusy);
}

function roundBox(round, place) {
  const asked = made("div", { className: "turn user" }, made("div", { className: "text" }, round.question));
  const tools = iconButton("edit_it", "✎", words.edit, () => edit(round, asked));
  const isLast = place === current.rounds.length - 1;
  const answers = Object.entries(round.answers).map(([name, reply]) => answerBox(round, name, reply, isLast));
  const columns = made("div", { className: "answers" }, ...answers);
  columns.style.setProperty("--columns", answers.length);
  return made("article", { className: "round" }, made("div", { className: "question" }, tools, asked), columns);
}

function answerBox(round, name, reply, isLast) {
  const isServed = served.models.some((model) => model.id === name);
  const thought = made("details", { className: "thought" }, made("summary", {}, words.thought), made("div", { className: "text" }));
  const copyIt = iconButton("copy_all", words.copy, words.copy, () => copyText(reply.content, copyIt));
  const again = iconButton("again", words.again, words.again, () => askModels(current, round, [name]));
  again.hidden = !(isLast && isServed);
  const box = made("section", { className: "turn assistant" }, made("h2", {}, name), thought, made("div", { className: "body" }),
    made("div", { className: "calls" }), made("p", { className: "problem" }),
    made("footer", {}, made("span", { className: "figures" }), copyIt, again));
  box.querySelector("h2").hidden = served.models.length < 2 && Object.keys(round.answers).length < 2 && isServed;
  boxes.set(reply, box);
  fill(reply);
  return box;
}

/** Put into its box what an answer says by now. */
function fill(reply) {
  const box = boxes.get(reply), part = (name) => box.querySelector("." + name), isRunning = running.has(reply) || reply.state === "open" && elsewhere.has(current.id);
  const problem = problemOf(reply, isRunning), { tokens, seconds } = reply;
  part("thought").hidden = !reply.reasoning_content;
  part("thought").lastChild.textContent = reply.reasoning_content ?? "";
  const said = isRunning && before.get(reply)?.startsWith(reply.content) ? before.get(reply) : reply.content;
  update(part("body"), markdown(said));
  update(part("calls"), (reply.tool_calls ?? []).map((call) => made("code", {}, say(words.call, call.function))));
  part("problem").hidden = !problem;
  part("problem").replaceChildren(problem, ...(reply.status === 401 && problem ? [keyButton()] : []));
  part("figures").textContent = isRunning ? words.answering
    : tokens ? say(words.figures, { tokens, seconds: seconds.toFixed(1), speed: Math.round(tokens / seconds) }) : "";
  box.classList.toggle("failed", reply.state === "failed");
  box.classList.toggle("busy", isRunning);
  part("again").disabled = isRunning;
  part("copy_all").hidden = isRunning || !reply.content;
}

function keyButton() {
  return made("button", { type: "button", onclick: () => openSettings("key") }, words.settings);
}

/** Show soon what is new in an answer, several pieces at once. */
function refresh(reply) {
  if (!toShow.size) requestAnimationFrame(showNew);
  toShow.add(reply);
}

function showNew() {
  keepingEnd(() => { for (const reply of toShow) if (boxes.get(reply)?.isConnected) fill(reply); });
  toShow.clear();
}

/** Show the conversation as it is by now, but not while a question in it is being edited. */
function showAgain() {
  const talk = byId("talk"), place = talk.scrollTop;
  if (!talk.querySelector(".edit")) keepingEnd(() => { show(); talk.scrollTop = place; });
}

/** Change what is shown; who reads the end goes on to the new one. */
function keepingEnd(change) {
  const talk = byId("talk"), isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
  change();
  if (isAtEnd) talk.scrollTop = talk.scrollHeight;
}

function showEnd(reply) {
  refresh(reply);
  showButtons();
  if (!isTouch && document.activeElement === document.body) byId("question").focus();
}

function ask(question) {
  const round = { question, answers: {} };
  current.rounds.push(round);
  askModels(current, round, chosenModels());
  byId("talk").scrollTop = byId("talk").scrollHeight;
}

/** Let the question of a round be written anew; when it is sent, what was said from there on goes. */
function edit(round, asked) {
  if (isAnswering(current)) return;
  const place = current.rounds.indexOf(round);
  const input = made("textarea", { value: round.question, rows: 1, ariaLabel: words.edit });
  const cancel = made("button", { type: "button", onclick: () => show() }, words.cancel);
  const form = made("form", { className: "edit" }, input, cancel, made("button", { className: "main" }, words.send));
  const send = () => {
    if (!input.value.trim()) return;
    current.rounds.splice(place);
    ask(input.value.trim());
  };
  form.onsubmit = (event) => { event.preventDefault(); send(); };
  input.oninput = () => grow(input);
  input.onkeydown = (event) => {
    if (isSending(event)) { event.preventDefault(); send(); }
    if (event.key === "Escape") { event.stopPropagation(); show(); byId("question").focus(); }
  };
  asked.replaceChildren(form);
  grow(input);
  input.focus();
}

function isSending(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229 && !isTouch;
}

function submit() {
  const question = byId("question").value.trim();
  if (!question || isAnswering(current)) return;
  setDraft("");
  ask(question);
}

function setDraft(text) {
  byId("question").value = text;
  keepDraft();
}

function keepDraft() {
  grow(byId("question"));
  write("sessionStorage", "draft", byId("question").value);
}

function grow(box) {
  box.style.height = "auto";
  box.style.height = box.scrollHeight + 2 + "px";
}

/** Copy a text, also where the browser gives pages without https no clipboard. */
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = made("textarea", { value: text, className: "copied" });
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    button.focus();
  }
  button.textContent = words.copied;
  setTimeout(() => { button.textContent = words.copy; }, 1500);
}

/** Say something above the question, with a button if `act` is given; it goes by itself unless it `stays`. */
function tell(text, label = "", act = null, stays = false) {
  const hide = () => { byId("notice").hidden = true; };
  const button = made("button", { type: "button", onclick: () => { hide(); act(); } }, label);
  byId("notice").replaceChildren(text, ...(act ? [button] : []));
  byId("notice").hidden = false;
  clearTimeout(noticeTimer);
  if (!stays) noticeTimer = setTimeout(hide, NOTICE_MILLISECONDS);
}

function openSettings(name) {
  byId("settings").showModal();
  if (name) byId("option_" + name)?.focus();
}

/** Open or close what lies over the conversation on a narrow window; on a wide one the run stands beside it. */
function openDrawer(name) {
  document.body.dataset.drawer = document.body.dataset.drawer === name ? "" : name;
  if (name === "run") document.body.classList.toggle("noRun");
}

function closeDrawers() {
  document.body.dataset.drawer = "";
}

function startTalk() {
  if (current.rounds.length) openTalk(newTalk());
  closeDrawers();
  byId("question").focus();
}

function pressed(event) {
  if (event.key === "Escape" && !byId("settings").open) {
    if (document.body.dataset.drawer) closeDrawers();
    else stopAnswers(current);
  }
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    startTalk();
  }
}

function setUp() {
  const models = served.models.map((model) => model.id), select = byId("models");
  byId("model").textContent = models.join(", ");
  select.append(new Option(words.model_all, ""), ...models.map((name) => new Option(name, name)));
  select.hidden = models.length < 2;
  byId("question").placeholder = isTouch ? words.ask_phone : words.ask;
  if (isTouch) byId("stop").textContent = words.stop_phone;
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  byId("question").addEventListener("input", keepDraft);
  byId("question").addEventListener("keydown", (event) => {
    if (isSending(event)) { event.preventDefault(); submit(); }
    const last = byId("talk").querySelector(".round:last-child .edit_it");
    if (event.key === "ArrowUp" && !byId("question").value && last) { event.preventDefault(); last.click(); }
  });
  byId("talk").addEventListener("click", ({ target }) => {
    if (target.className === "copy") copyText(target.closest(".code").querySelector("pre").textContent, target);
  });
  const clicks = {
    stop: () => stopAnswers(current), new: startTalk, openSettings: () => openSettings(), resetSettings,
    openTalks: () => openDrawer("talks"), openRun: () => openDrawer("run"),
  };
  for (const [id, click] of Object.entries(clicks)) byId(id).addEventListener("click", click);
  addEventListener("keydown", pressed);
  document.querySelector("main").addEventListener("pointerdown", ({ target }) => { if (!target.closest("header")) closeDrawers(); });
  setUpSettings();
  loadTalks();
  goOn();
  openTalk(talks.get(read("sessionStorage", "open", "")) ?? newest() ?? newTalk());
  setDraft(read("sessionStorage", "draft", ""));
  addEventListener("storage", takeOver);
  addEventListener("pagehide", () => {
    [...toSave.keys()].forEach(saveTalk);
    write("sessionStorage", "open", current.id);
  });
  setUpRun();
}

setUp();
