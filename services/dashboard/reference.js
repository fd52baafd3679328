// The page of the API, at /docs: every operation of openapi.json, with a form that sends it.

import { keepKey, keyHeaders } from "./api.js";
import { fill, h, table } from "./elements.js";

/** Characters of an answer that are shown; an event stream has no end. */
const SHOWN = 100_000;

const nameOf = (reference) => reference.split("/").at(-1);
const codes = (text) => (text ?? "").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** Describe a type in words; a type with a name is a link to its fields. */
function typeOf(schema) {
  if (typeof schema !== "object") return ["anything"];
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    return [h("a", { href: `#${name}`, onclick: () => openType(name) }, name)];
  }
  const forms = schema.anyOf ?? schema.oneOf;
  if (forms) return forms.flatMap((form, i) => [i ? " or " : "", ...typeOf(form)]);
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items)];
  if (schema.type === "object" && schema.additionalProperties) {
    return ["names with ", ...typeOf(schema.additionalProperties)];
  }
  return [schema.format ?? schema.type ?? "anything"];
}

function openType(name) {
  document.getElementById(name).open = true;
}

function fieldsOf(name, schema) {
  const required = new Set(schema.required);
  const rows = Object.entries(schema.properties ?? {}).map(([field, each]) => [
    h("code", {}, field),
    h("span", {}, typeOf(each)),
    required.has(field) ? "required" : "default" in each ? JSON.stringify(each.default) : "",
    h("span", { class: "words" }, codes(each.description)),
  ]);
  return h("details", { id: name },
    h("summary", {}, name),
    h("p", {}, codes(schema.description)),
    table(name, ["Field", "Value", "Default", "Meaning"], rows));
}

/** Return the first example of a body, as text. */
function exampleOf(body) {
  const content = body?.content?.["application/json"];
  const [first] = Object.values(content?.examples ?? {});
  return first ? JSON.stringify(first.value, null, 2) : "{}";
}

/** Return the address of a request, without a slash in front, so that a proxy may add a path. */
function addressOf(path, parameters, form) {
  const query = new URLSearchParams();
  let place = path;
  for (const { name, in: where } of parameters) {
    const value = form.elements[name].value.trim();
    // A name of an artifact may hold slashes, which stay as they are.
    if (where === "path") {
      const text = value.split("/").map(encodeURIComponent).join("/");
      place = place.replace(new RegExp(`\\{${name}(:path)?\\}`), () => text);
    } else if (where === "query" && value) query.set(name, value);
  }
  const text = query.toString();
  return `.${place}${text && `?${text}`}`;
}

function headersOf(parameters, form, hasBody) {
  const headers = keyHeaders();
  if (hasBody) headers["Content-Type"] = "application/json";
  for (const { name, in: where } of parameters) {
    const value = where === "header" && form.elements[name].value.trim();
    if (value) headers[name] = value;
  }
  return headers;
}

/** Read an answer as it comes, and show the beginning of it in `box`. */
async function show(answer, box) {
  const decoder = new TextDecoder();
  const reader = answer.body?.getReader();
  let text = "";
  while (reader && text.length < SHOWN) {
    const { done, value } = await reader.read();
    if (done) break;
    text += decoder.decode(value, { stream: true });
    box.textContent = text;
  }
  await reader?.cancel();
  if (answer.headers.get("Content-Type")?.includes("json")) {
    try {
      box.textContent = JSON.stringify(JSON.parse(text), null, 2);
    } catch { /* it is longer than what is shown */ }
  }
}

async function send(method, path, parameters, form, output) {
  const body = form.elements.body?.value;
  const stop = new AbortController();
  const box = h("pre", {});
  const status = h("p", {}, "The request is sent.");
  const button = h("button", { type: "button", onclick: () => stop.abort() }, "Stop");
  output.replaceChildren(status, button, box);
  try {
    const answer = await fetch(addressOf(path, parameters, form), {
      method, body, headers: headersOf(parameters, form, body !== undefined),
      signal: stop.signal, cache: "no-store",
    });
    status.textContent = `${answer.status} ${answer.statusText}`;
    status.className = answer.ok ? "good" : "error";
    await show(answer, box);
  } catch (error) {
    if (error.name !== "AbortError") {
      status.textContent = "The server does not answer.";
      status.className = "error";
    }
  }
  button.remove();
}

function inputOf({ name, in: where, required, description, schema }) {
  return h("label", { class: "parameter" },
    h("code", {}, name), ` ${where} `, h("span", { class: "quiet" }, typeOf(schema)),
    h("input", { name, required: required === true, autocomplete: "off" }),
    h("span", { class: "words" }, codes(description)));
}

function operationOf(path, method, operation) {
  const parameters = operation.parameters ?? [];
  const output = h("div", { class: "answer", "aria-live": "polite" });
  const body = operation.requestBody && h("textarea", {
    name: "body", rows: 10, spellcheck: "false", "aria-label": "The body, as JSON",
  });
  if (body) body.value = exampleOf(operation.requestBody);
  const submit = (event) => {
    event.preventDefault();
    send(method.toUpperCase(), path, parameters, event.target, output);
  };
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const rows = Object.entries(operation.responses).map(([status, { description, content }]) => {
    const answer = Object.values(content ?? {})[0]?.schema;
    const words = h("span", { class: "words" }, codes(description));
    return [status, h("span", {}, answer ? typeOf(answer) : ""), words];
  });
  return h("details", { id: operation.operationId, class: "operation" },
    h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), ` ${operation.summary}`),
    operation.description?.split("\n\n").map((text) => h("p", {}, codes(text))),
    h("form", { onsubmit: submit },
      parameters.map(inputOf),
      body && h("p", {}, "Body: ", h("span", {}, typeOf(schema))),
      body,
      h("p", {}, h("button", { class: "main" }, "Send"))),
    output,
    table("Answers", ["Status", "Content", "Meaning"], rows));
}

/** Group the operations by their first tag, in the order of the document. */
function groupsOf(paths) {
  const groups = new Map();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "others";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationOf(path, method, operation));
    }
  }
  return groups;
}

function keyForm() {
  const done = h("span", { "aria-live": "polite" });
  const keep = (event) => {
    event.preventDefault();
    keepKey(event.target.elements.key.value);
    done.textContent = " The key is kept in this tab until it is closed.";
  };
  return h("form", { onsubmit: keep },
    h("label", {}, "API key, if the server asks for one: ",
      h("input", { name: "key", type: "password", autocomplete: "off", placeholder: "kd_..." })),
    " ", h("button", {}, "Use this key"), done);
}

async function start() {
  const page = document.getElementById("page");
  const answer = await fetch("./openapi.json");
  if (!answer.ok) {
    fill(page, h("p", { class: "error" }, `The server answered ${answer.status}.`));
    return;
  }
  const { info, paths, components } = await answer.json();
  const schemas = Object.entries(components.schemas);
  page.replaceChildren(
    h("h1", {}, `The API of ${info.title} ${info.version}`),
    h("p", {}, "Every path exists twice, at / and at /v1. ",
      "Send really sends the request: it may create, change or delete."),
    keyForm(),
    ...[...groupsOf(paths)].flatMap(([tag, operations]) => [h("h2", {}, tag), ...operations]),
    h("h2", {}, "Types"),
    ...schemas.map(([name, schema]) => fieldsOf(name, schema)));
}

start();
