"use strict";
// What the server told of itself, the words in the browser's language, and the making of elements.

const served = JSON.parse(document.getElementById("served").textContent);
const byId = (id) => document.getElementById(id);
const language = chosenLanguage();
const words = served.words[language];

/** What the browser keeps under a name in "localStorage" or "sessionStorage". */
function read(storage, name, otherwise) {
  try {
    return JSON.parse(window[storage].getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // it is forbidden, or damaged
  }
}

/** Whether the browser keeps `value` from now on. */
function write(storage, name, value) {
  try {
    window[storage].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // it is full, or forbidden
  }
}

function chosenLanguage() {
  const asked = [read("localStorage", "settings", {}).language, ...navigator.languages];
  const known = asked.map((name) => String(name).toLowerCase().split("-")[0]).filter((name) => Object.hasOwn(served.words, name));
  return known[0] ?? "en";
}

function say(text, values) {
  return text.replace(/\{(\w+)\}/g, (_, name) => typeof values[name] === "number" ? values[name].toLocaleString("en") : values[name]);
}

/** An element with these properties and children, texts or nodes. */
function made(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

function iconButton(name, text, label, onclick) {
  return made("button", { type: "button", className: name, title: label, ariaLabel: label, onclick }, text);
}

/** Make the children of `parent` these nodes; those that are so already stay, with what is selected or open in them. */
function update(parent, nodes) {
  nodes.forEach((node, place) => {
    const old = parent.childNodes[place];
    if (!old) parent.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (parent.childNodes.length > nodes.length) parent.lastChild.remove();
}

document.documentElement.lang = language;
for (const element of document.querySelectorAll("[data-text]")) element.textContent = words[element.dataset.text];
for (const element of document.querySelectorAll("[data-label]")) {
  element.ariaLabel = words[element.dataset.label];
  if (element.tagName === "BUTTON") element.title = element.ariaLabel;
}
