// The inputs of a job's fields, made from their description (schema.js).
//
// A control is {element, show(value), find(words)}: `show` puts the value of the job into it, and
// `find` hides it unless it has the words in its name or description. What a user changes goes to
// `change(path, value)` of the context; undefined is a field that is not given.
// Each field's element has its JSON pointer in data-path.

import { h } from "../elements.js";
import { pointerOf } from "./pointers.js";
import { fits, formOfValue, isOptional, seedOf } from "./schema.js";
import { isObject, numberText, read } from "./yaml_text.js";

/** A section with more fields than this shows the usual ones first. */
const FEW = 9;

const isGiven = (value) => value !== undefined && value !== null;

/** Make the control of a field; `title` is its label where it has no name of its own. */
export function fieldControl(field, path, context, title = field.name) {
  const [form] = field.forms;
  const isLine = field.forms.length === 1 && !["section", "list", "map"].includes(form.type);
  return isLine
    ? lineControl(field, form, path, context, title)
    : groupControl(field, path, context, title);
}

const helpOf = (id, text) => h("p", { id: `${id}-help`, class: "help" }, text);
const problemOf = (id) => h("p", { id: `${id}-problem`, class: "problem error" });
const describedBy = (id) => ({ id, "aria-describedby": `${id}-problem ${id}-help` });

/** The control of a field with one kind of value, which stands on one line. */
function lineControl(field, form, path, context, title) {
  const id = `field${pointerOf(path)}`;
  const entry = entryOf(field, form, path, context, describedBy(id));
  const element = h("div", { class: "field", "data-path": pointerOf(path) },
    h("label", { for: id }, title),
    form.bounds && h("span", { class: "bounds" }, form.bounds),
    entry.element, problemOf(id), helpOf(id, field.description));
  const find = (words) => {
    element.hidden = !textOf(field, path).includes(words);
    return !element.hidden;
  };
  return { element, show: entry.show, find };
}

/** All words by which a field is found: its own and those of the fields in it. */
function textOf(field, path) {
  const inner = (each) => [each.name, each.description, ...each.forms.flatMap((form) => [
    ...(form.section?.fields ?? []), ...(form.item ? [form.item] : []),
  ].map(inner))].join(" ");
  return `${path.join(".")} ${inner(field)}`.toLowerCase();
}

// ------------------------------------------------------------------ one value

/** Make the input of one value; `attributes` are its id and its descriptions, or its label. */
function entryOf(field, form, path, context, attributes) {
  const { type } = form;
  if (type === "choice" || type === "boolean") {
    return choiceEntry(field, form.choices ?? [true, false], path, context, attributes);
  }
  const element = h("input", {
    ...attributes, class: "entry", spellcheck: "false", autocomplete: "off",
    placeholder: field.required ? "required" : standardOf(field),
    inputmode: type === "number" ? "decimal" : null,
    oninput: () => context.change(path, valueOf(element.value, type) ?? context.empty),
    onchange: () => context.refresh(),
  });
  const show = (value) => {
    // What the user types stays as it is typed: "1." is on the way to "1.5".
    if (document.activeElement !== element) element.value = shownOf(value);
  };
  return { element, show };
}

function choiceEntry(field, choices, path, context, attributes) {
  const none = field.required ? "choose" : standardOf(field) || "not given";
  const element = h("select", {
    ...attributes, class: "entry",
    onchange: () => context.change(path, element.value === ""
      ? context.empty : choices.find((each) => String(each) === element.value)),
  });
  const show = (value) => {
    const given = isGiven(value) && value !== "";
    const known = !given || choices.includes(value);
    const options = [["", none], ...choices.map((each) => [String(each), String(each)])];
    // A value that the field may not have is shown, so that it can be seen and changed.
    if (!known) options.push([shownOf(value), `${shownOf(value)} (not possible)`]);
    element.replaceChildren(...options.map(([each, text]) => h("option", { value: each }, text)));
    element.value = given ? shownOf(value) : "";
  };
  return { element, show };
}

const standardOf = ({ standard }) =>
  (isGiven(standard) && typeof standard !== "object" ? `default: ${shownOf(standard)}` : "");

function shownOf(value) {
  if (!isGiven(value)) return "";
  if (typeof value === "number") return numberText(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** The value of a typed text; a text where a number belongs stays one, such as 16GiB. */
function valueOf(text, type) {
  if (text === "") return undefined;
  if (type === "text") return text;
  if (type === "plain") {
    const { data } = read(text);
    return data === null || typeof data === "object" || data === undefined ? text : data;
  }
  const number = Number(text);
  return text.trim() !== "" && Number.isFinite(number) ? number : text;
}

// ------------------------------------------------------------------ several values, or kinds

/** The control of a field that is a section, a list or a map, or one of several kinds. */
function groupControl(field, path, context, title) {
  const id = `field${pointerOf(path)}`;
  const optional = isOptional(field) && !field.required;
  const several = field.forms.length > 1;
  let chosen = null;
  let shown = null;
  let body = null;
  const box = h("div", { class: "body" });
  const kinds = [...(optional ? [["", "not given"]] : []),
    ...field.forms.map((form, place) => [String(place), several ? form.label : "given"])];
  const select = h("select", {
    "aria-label": `Kind of ${path.join(".")}`, "data-kind": pointerOf(path), class: "kind",
    onchange: () => {
      chosen = select.value === "" ? null : field.forms[Number(select.value)];
      context.change(path, chosen === null ? undefined : seedOf(chosen) ?? context.empty);
    },
  }, kinds.map(([value, text]) => h("option", { value }, text)));
  const element = h("fieldset", {
    class: "field group", "data-path": pointerOf(path), id, tabindex: -1,
    "aria-describedby": `${id}-problem ${id}-help`,
  },
    h("legend", {}, title),
    problemOf(id), helpOf(id, field.description),
    kinds.length > 1 && h("p", { class: "line" }, select), box);

  const show = (value) => {
    const form = optional && !isGiven(value) ? null : kindOf(value);
    if (form !== shown || body === null) {
      shown = form;
      body = form === null ? null : bodyOf(field, form, path, context, title);
      box.replaceChildren(...(body ? [body.element] : []));
    }
    select.value = form === null ? "" : String(field.forms.indexOf(form));
    body?.show(value);
  };
  // Where the value tells no kind, it is the one that the user chose last.
  const kindOf = (value) => {
    const form = isGiven(value) ? formOfValue(field.forms, value) : field.forms[0];
    return chosen && !fits(form, value) ? chosen : form;
  };
  const find = (words) => {
    element.hidden = !textOf(field, path).includes(words);
    if (!element.hidden) body?.find?.(words);
    return !element.hidden;
  };
  return { element, show, find };
}

function bodyOf(field, form, path, context, title) {
  if (form.type === "section") return sectionBody(form.section, path, context);
  if (form.type === "list") return listBody(form, path, context, title);
  if (form.type === "map") return mapBody(form, path, context, title);
  const line = entryOf(field, form, path, context, { "aria-label": `${title}: ${form.label}` });
  const element = h("div", { class: "line" },
    line.element, form.bounds && h("span", { class: "bounds" }, form.bounds));
  return { element, show: line.show };
}

/** The fields of a section: the usual ones, and the others behind a summary. */
export function sectionBody(section, path, context) {
  const inner = { ...context, empty: undefined };
  const controls = section.fields
    .map((field) => [field, fieldControl(field, [...path, field.name], inner)]);
  const isFirst = ([field]) => (controls.length <= FEW && path.length > 0) || field.required
    || context.isUsual([...path, field.name]);
  const first = controls.filter(isFirst);
  const others = controls.filter((each) => !isFirst(each));
  const summary = h("summary", {});
  const elementsOf = (pairs) => pairs.map(([, { element }]) => element);
  const more = others.length === 0 ? null
    : h("details", { class: "more" }, summary, h("div", { class: "fields" }, elementsOf(others)));
  const element = h("div", { class: "fields" }, elementsOf(first), more);

  const show = (value) => {
    const held = isObject(value) ? value : {};
    for (const [field, control] of controls) control.show(held[field.name]);
    if (!more) return;
    const given = others.filter(([{ name }]) => isGiven(held[name])).length;
    summary.textContent = `${others.length} more fields${given ? `, ${given} given` : ""}`;
  };
  const find = (words) => {
    const found = (pairs) => pairs.map(([, control]) => control.find(words)).some(Boolean);
    const foundFirst = found(first);
    const foundOthers = found(others);
    if (more) {
      more.hidden = !foundOthers;
      more.open = words !== "" && foundOthers;
    }
    return foundFirst || foundOthers;
  };
  return { element, show, find };
}

function listBody({ item }, path, context, title) {
  const rows = [];
  const list = h("ol", {});
  const element = h("div", {}, list,
    h("button", { type: "button", onclick: () => add() }, `Add to ${title}`));
  const inner = { ...context, empty: "" };
  const seed = () => seedOf(item.forms[0]) ?? "";
  const add = () => {
    context.change([...path, rows.length], seed());
    rows.at(-1)?.element.querySelector("input, select")?.focus();
  };
  const makeRow = (place) => {
    const control = fieldControl(item, [...path, place], inner, `${title} ${place + 1}`);
    const label = `Remove ${title} ${place + 1}`;
    const remove = h("button", {
      type: "button", class: "link", "aria-label": label,
      onclick: () => context.change([...path, place], undefined),
    }, "Remove");
    return { ...control, element: h("li", {}, control.element, remove) };
  };
  const show = (value) => {
    const items = Array.isArray(value) ? value : isGiven(value) ? [value] : [];
    while (rows.length > items.length) rows.pop().element.remove();
    while (rows.length < items.length) {
      rows.push(makeRow(rows.length));
      list.append(rows.at(-1).element);
    }
    rows.forEach((row, place) => row.show(items[place]));
  };
  return { element, show };
}

function mapBody({ item }, path, context, title) {
  const rows = new Map();
  const list = h("ul", {});
  const name = h("input", {
    "aria-label": `New name in ${title}`, placeholder: "name", autocomplete: "off",
    spellcheck: "false",
    onkeydown: (event) => event.key === "Enter" && add(),
  });
  const element = h("div", {}, list,
    h("p", { class: "line" }, name,
      h("button", { type: "button", onclick: () => add() }, `Add to ${title}`)));
  const inner = { ...context, empty: "" };
  const add = () => {
    const key = name.value.trim();
    if (key === "" || rows.has(key)) {
      name.focus();
      return;
    }
    name.value = "";
    context.change([...path, key], seedOf(item.forms[0]) ?? "");
    rows.get(key)?.element.querySelector("input, select")?.focus();
  };
  const makeRow = (key) => {
    const control = fieldControl(item, [...path, key], inner, key);
    const remove = h("button", {
      type: "button", class: "link", "aria-label": `Remove ${key}`,
      onclick: () => context.change([...path, key], undefined),
    }, "Remove");
    return { ...control, element: h("li", {}, control.element, remove) };
  };
  const show = (value) => {
    const entries = isObject(value) ? value : {};
    for (const [key, row] of rows) {
      if (key in entries) continue;
      row.element.remove();
      rows.delete(key);
    }
    for (const [key, each] of Object.entries(entries)) {
      if (!rows.has(key)) {
        rows.set(key, makeRow(key));
        list.append(rows.get(key).element);
      }
      rows.get(key).show(each);
    }
  };
  return { element, show };
}
