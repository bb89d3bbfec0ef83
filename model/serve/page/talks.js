"use strict";
// The conversations, kept in this browser's storage, each under a name of its own.
//
// A talk is { id, title, changed, rounds }; a round a question with an answer of each model that was asked:
// { question, answers: { model: { content, reasoning_content, tool_calls, state, … } } }.

const SAVE_MILLISECONDS = 500; // between two saves of a talk that is being answered
const talks = new Map();
const items = new Map(); // id of a talk to its entry in the list
const SILENT_MILLISECONDS = 4000; // of another tab, after which nothing is under way there
const toSave = new Map(); // talk to its timer
const elsewhere = new Map(); // id of a talk that another tab answers in to its timer

/** Whether a kept value is an answer as it is shown: what another page of this address has kept may be anything. */
function isReply(value) {
  const { content, reasoning_content: thought = "", tool_calls: calls = [], tokens = 0, seconds = 0 } = value ?? {};
  const isCall = (call) => typeof call?.function === "object" && call.function !== null;
  const isText = [content, thought].every((text) => typeof text === "string");
  return isText && Array.isArray(calls) && calls.every(isCall) && [tokens, seconds].every(Number.isFinite);
}

function isTalk(value) {
  const isRound = (round) => typeof round?.question === "string" && typeof round.answers === "object"
    && round.answers !== null && Object.values(round.answers).every(isReply);
  return typeof value?.id === "string" && Array.isArray(value.rounds) && value.rounds.every(isRound);
}

function loadTalk(key) {
  const talk = read("localStorage", key, null);
  if (isTalk(talk) && key === "talk:" + talk.id) talks.set(talk.id, talk);
}

function loadTalks() {
  try {
    Object.keys(localStorage).filter((key) => key.startsWith("talk:")).forEach(loadTalk);
  } catch {
    tell(words.full);
  }
}

function newTalk() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", changed: Date.now(), rounds: [] };
}

function titleOf(talk) {
  return talk.title || talk.rounds[0]?.question.trim().split("\n")[0].slice(0, 80) || words.new_talk;
}

function saveTalk(talk) {
  clearTimeout(toSave.get(talk));
  toSave.delete(talk);
  if (talks.get(talk.id) !== talk) return; // it was deleted
  if (!write("localStorage", "talk:" + talk.id, talk)) tell(words.full);
}

function saveSoon(talk) {
  if (!toSave.has(talk)) toSave.set(talk, setTimeout(saveTalk, SAVE_MILLISECONDS, talk));
}

/** Keep a talk with what was changed in it now. */
function keepTalk(talk) {
  talk.changed = Date.now();
  talks.set(talk.id, talk);
  saveTalk(talk);
  showList();
}

function removeTalk(talk) {
  stopAnswers(talk);
  talks.delete(talk.id);
  try { localStorage.removeItem("talk:" + talk.id); } catch { /* nothing was kept */ }
  if (talk === current) openTalk(newest() ?? newTalk());
  showList();
  tell(say(words.deleted, { title: titleOf(talk) }), words.undo, () => { keepTalk(talk); openTalk(talk); });
  if (document.activeElement === document.body) byId("notice").querySelector("button").focus(); // its entry had the focus
}

function newest() {
  return [...talks.values()].sort((one, other) => other.changed - one.changed)[0];
}

/** The list, newest first; an entry stays the same element, so that what has the focus there keeps it. */
function showList() {
  const list = byId("list"), sorted = [...talks.values()].sort((one, other) => other.changed - one.changed);
  for (const id of items.keys()) if (!talks.has(id)) items.delete(id);
  const entries = sorted.map((talk) => {
    if (!items.has(talk.id)) items.set(talk.id, listItem(talk.id));
    const item = items.get(talk.id), open = item.open;
    item.className = isAnswering(talk) ? "busy" : "";
    open.textContent = open.title = titleOf(talk);
    open.ariaCurrent = String(talk === current);
    return item;
  });
  if (entries.length !== list.children.length || entries.some((item, place) => item !== list.children[place])) {
    list.replaceChildren(...entries);
  }
}

function listItem(id) {
  const open = made("button", { type: "button", className: "title", onclick: () => { openTalk(talks.get(id)); closeDrawers(); } });
  const rename = iconButton("rename", "✎", words.rename, () => askTitle(talks.get(id), item));
  const remove = iconButton("remove", "✕", words.delete, () => removeTalk(talks.get(id)));
  const item = made("li", { open }, open, rename, remove);
  return item;
}

function askTitle(talk, item) {
  const input = made("input", { value: titleOf(talk), maxLength: 80, ariaLabel: words.rename }), parts = [...item.children];
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return;
    isOver = true;
    if (isKept) talk.title = input.value.trim();
    if (isKept) saveTalk(talk);
    const hadFocus = document.activeElement === input;
    item.replaceChildren(...parts);
    showList();
    if (hadFocus) item.open.focus();
  };
  input.onkeydown = (event) => {
    if (event.key === "Enter" && !event.isComposing) { event.preventDefault(); end(true); } // it would press the title
    if (event.key === "Escape") end(false);
    event.stopPropagation();
  };
  input.onblur = () => end(true);
  item.replaceChildren(input);
  input.select();
}

/** Take over what another tab has changed in a talk, but for the answers that are under way in this one. */
function takeOver({ key }) {
  if (!key?.startsWith("talk:")) return;
  const id = key.slice("talk:".length), old = talks.get(id);
  talks.delete(id);
  loadTalk(key);
  const taken = talks.get(id);
  if (old && (taken || isAnswering(old))) {
    if (taken) Object.assign(old, taken, { rounds: mergedRounds(old.rounds, taken.rounds) });
    talks.set(id, old);
  }
  noteElsewhere(id);
  showList();
  if (old !== current || !old) return;
  if (talks.has(id)) showAgain();
  else openTalk(newTalk());
}

/** The rounds that another tab has kept, with this one's answers that are under way. */
function mergedRounds(mine, theirs) {
  const left = [...mine];
  const merged = theirs.map((round) => {
    const place = left.findIndex((own) => own.question === round.question);
    if (place < 0) return round;
    const [own] = left.splice(place, 1);
    own.answers = { ...round.answers, ...underWay(own) };
    return own;
  });
  return [...merged, ...left.filter((own) => Object.keys(underWay(own)).length)];
}

function underWay(round) {
  return Object.fromEntries(Object.entries(round.answers).filter(([, reply]) => running.has(reply)));
}

/** An open answer of a talk that another tab has just kept is under way there; after a while without a word it was cut. */
function noteElsewhere(id) {
  clearTimeout(elsewhere.get(id));
  elsewhere.set(id, setTimeout(() => {
    elsewhere.delete(id);
    if (id === current.id) showAgain();
  }, SILENT_MILLISECONDS));
}
