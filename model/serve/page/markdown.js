"use strict";
// Markdown as nodes. What an answer says is only ever put in as text, so none of it becomes markup; links lead to http
// and https alone, and a picture is a link to it. Searches are bounded, so that no text takes long.

const MAX_DEPTH = 8; // of quotes, lists and emphasis in each other
const MAX_SPAN = 2000; // characters from one mark to the mark that ends it
const MAX_ENDS = 50; // marks that are looked at as the end of a span
const LINE_END = /\r?\n|[\u2028\u2029]/; // what a dot in a pattern does not match
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const QUOTE = /^\s{0,3}>\s?/;
const TAGS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", _: "em" };
const PARTS = { "`": codeSpan, "*": emphasis, _: emphasis, "~": emphasis, "[": link, "!": link, h: address, "\\": escaped };

function markdown(text) {
  return blocks(text.split(LINE_END), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) at++;
    else {
      const [node, next] = block(lines, at, depth) ?? paragraph(lines, at, depth);
      nodes.push(node);
      at = next;
    }
  }
  return nodes;
}

/** [node, the line after it] of a block that begins at a line, null for a plain paragraph. */
function block(lines, at, depth) {
  return fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? table(lines, at)
    ?? (depth < MAX_DEPTH ? quote(lines, at, depth) ?? list(lines, at, depth) : null);
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end, depth)) end++;
  return [made("p", {}, ...inline(lines.slice(at, end).join("\n"), 0)), end];
}

function begins(lines, at, depth) {
  const isNested = depth < MAX_DEPTH && (QUOTE.test(lines[at]) || ITEM.test(lines[at]));
  return isNested || fenceMark(lines[at]) || heading(lines, at) || rule(lines, at) || isTable(lines, at);
}

function fenceMark(line) {
  const found = /^\s{0,3}(`{3,}|~{3,})(.*)$/.exec(line);
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? found : null;
}

function fence(lines, at) {
  const found = fenceMark(lines[at]);
  if (!found) return null;
  const [, mark, rest] = found;
  const closes = (line) => line.length >= mark.length && line === mark[0].repeat(line.length);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end].trim())) end++;
  return [codeBox(lines.slice(at + 1, end).join("\n"), rest.trim().split(/\s/)[0]), end + 1];
}

function codeBox(text, name) {
  const copy = made("button", { type: "button", className: "copy" }, words.copy);
  return made("div", { className: "code" }, made("header", {}, made("span", {}, name), copy),
    made("pre", { tabIndex: 0 }, made("code", {}, text)));
}

function heading(lines, at) {
  const found = /^\s{0,3}(#{1,6})\s+(.*)$/.exec(lines[at]);
  return found ? [made("h" + Math.min(6, found[1].length + 2), {}, ...inline(found[2], 0)), at + 1] : null;
}

function rule(lines, at) {
  const marks = lines[at].replace(/\s/g, "");
  return marks.length >= 3 && /^(?:-+|\*+|_+)$/.test(marks) ? [made("hr", {}), at + 1] : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return end > at ? [made("blockquote", {}, ...blocks(inside, depth + 1)), end] : null;
}

const indentOf = (line) => line.length - line.trimStart().length;
const isOrdered = (item) => /\d/.test(item[2]);

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const items = [], base = first[1].length;
  let inner = Infinity; // columns before the text of the newest item
  for (; at < lines.length; at++) {
    const line = lines[at], found = ITEM.exec(line), indent = indentOf(line);
    if (found && indent < inner && isOrdered(found) === isOrdered(first)) {
      inner = indent + found[2].length + 1;
      items.push([found[3] ?? ""]);
    } else if (!line.trim()) {
      let next = at;
      while (next < lines.length && !lines[next].trim()) next++;
      const another = next < lines.length && ITEM.exec(lines[next]);
      if (next === lines.length || indentOf(lines[next]) < inner && !(another && isOrdered(another) === isOrdered(first))) break;
      items.at(-1).push("");
      at = next - 1;
    } else if (indent >= inner || found && indent > base) items.at(-1).push(line.slice(Math.min(indent, inner)));
    else if (!lines[at - 1].trim() || begins(lines, at, depth)) break;
    else items.at(-1).push(line.trimStart()); // a paragraph that goes on
  }
  const properties = isOrdered(first) ? { start: parseInt(first[2], 10) } : {};
  return [made(isOrdered(first) ? "ol" : "ul", properties, ...items.map((item) => made("li", {}, ...blocks(item, depth + 1)))), at];
}

function isTable(lines, at) {
  const below = lines[at + 1] ?? "";
  return lines[at].includes("|") && /^[\s|:-]+$/.test(below) && below.includes("-") && below.includes("|");
}

function cellsOf(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

function table(lines, at) {
  if (!isTable(lines, at)) return null;
  const sides = cellsOf(lines[at + 1]).map((cell) => cell.endsWith(":") ? cell.startsWith(":") ? "center" : "right" : "left");
  const row = (line, name) => made("tr", {}, ...cellsOf(line).slice(0, sides.length).map((cell, place) =>
    made(name, { className: sides[place] }, ...inline(cell, 0))));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const whole = made("table", {}, made("thead", {}, row(lines[at], "th")), made("tbody", {}, ...body));
  return [made("div", { className: "wide" }, whole), end];
}

/** The nodes and texts of a paragraph's text. */
function inline(text, depth) {
  const nodes = [];
  let plain = 0, at = 0;
  while (at < text.length) {
    const found = PARTS[text[at]]?.(text, at, depth);
    if (found) {
      nodes.push(text.slice(plain, at), found[0]);
      plain = at = found[1];
    } else at++;
  }
  return [...nodes, text.slice(plain)].filter((node) => node !== "");
}

function escaped(text, at) {
  return "\\`*_[]#|~>".includes(text[at + 1] ?? " ") ? [text[at + 1], at + 2] : null;
}

function codeSpan(text, at) {
  let length = 1;
  while (text[at + length] === "`") length++;
  const mark = "`".repeat(length), near = text.slice(at + length, at + MAX_SPAN);
  for (let end = near.indexOf(mark); end >= 0; end = near.indexOf(mark, end + 1)) {
    let run = length;
    while (near[end + run] === "`") run++;
    if (run === length) return [made("code", {}, near.slice(0, end).replace(/^ (.*) $/, "$1")), at + length + end + run];
    end += run - 1;
  }
  return [mark, at + length];
}

const isWord = (character) => /[A-Za-z0-9]/.test(character ?? "");
const isSpace = (character) => /^\s?$/.test(character ?? "");

function emphasis(text, at, depth) {
  const mark = Object.keys(TAGS).find((one) => text.startsWith(one, at));
  const from = mark && at + mark.length;
  if (!mark || depth >= MAX_DEPTH || isSpace(text[from]) || mark.length === 1 && isWord(text[at - 1])) return null;
  const near = text.slice(0, from + MAX_SPAN);
  for (let end = near.indexOf(mark, from + 1), left = MAX_ENDS; end >= 0 && left; end = near.indexOf(mark, end + 1), left--) {
    if (text[from] === mark[0] && near[end + mark.length] === mark[0]) end++; // the outermost of three marks
    const isInside = mark.length === 1 && (near[end - 1] === mark || isWord(near[end + 1]));
    if (!isInside && !isSpace(near[end - 1])) return [made(TAGS[mark], {}, ...inline(near.slice(from, end), depth + 1)), end + mark.length];
  }
  return null;
}

function link(text, at, depth) {
  const open = text[at] === "!" ? at + 1 : at, near = text.slice(at, at + MAX_SPAN);
  const middle = near.indexOf("]("), end = middle < 0 ? -1 : near.indexOf(")", middle);
  if (text[open] !== "[" || end < 0) return null;
  const url = webAddress(near.slice(middle + 2, end).trim().split(/\s/)[0]);
  const label = text.slice(open + 1, at + middle);
  return url ? [anchor(url, label || url), at + end + 1] : null;
}

function address(text, at) {
  const found = /^https?:\/\/[^\s<>"'`()[\]{}，。；：！？、（）【】《》“”‘’]+/.exec(text.slice(at, at + MAX_SPAN));
  if (!found || isWord(text[at - 1])) return null;
  const shown = found[0].replace(/[.,;:!?*_~]{1,9}$/, ""), url = webAddress(shown);
  return url ? [anchor(url, shown), at + shown.length] : null;
}

function webAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(url, label) {
  return made("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
