// A job as commands of other clients: curl, the command line and Python. No key is in them.

import { keyHeaders } from "../api.js";
import { h } from "../elements.js";
import { to } from "../paths.js";

const serverAddress = () => new URL(to("/"), location.href).href.replace(/\/$/, "");
const hasKey = () => "Authorization" in keyHeaders();

/** Quote a text for a shell. */
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A here-document that ends at a word that is no line of the text. */
function hereDocument(text) {
  let word = "EOF";
  while (text.split("\n").includes(word)) word += "F";
  return `<<'${word}'\n${text.trimEnd()}\n${word}`;
}

function curlOf({ data }) {
  const key = hasKey() ? ` \\\n  -H "Authorization: Bearer $KD_API_KEY"` : "";
  const type = "-H 'Content-Type: application/json'";
  return `curl -sS ${shell(`${serverAddress()}/jobs`)} \\\n  ${type}${key} \\\n`
    + `  --data-binary @- ${hereDocument(JSON.stringify(data, null, 2))}\n`;
}

function commandOf({ text }) {
  return `cat > job.yaml ${hereDocument(text)}\n`
    + `kd submit job.yaml --server ${shell(serverAddress())}\n`;
}

function pythonOf({ data }) {
  const address = JSON.stringify(serverAddress());
  return `import kd\n\nclient = kd.Client(${address})\n`
    + `job = client.submit(${literal(data, "")})\nprint(job.id)\n`;
}

/** A value of JSON as a literal of Python. */
function literal(value, indent) {
  const inner = `${indent}    `;
  const lines = (open, items, close) => {
    if (items.length === 0) return open + close;
    return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
  };
  if (Array.isArray(value)) return lines("[", value.map((each) => literal(each, inner)), "]");
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pairs = Object.entries(value)
    .map(([key, each]) => `${JSON.stringify(key)}: ${literal(each, inner)}`);
  return lines("{", pairs, "}");
}

const WAYS = [["curl", curlOf], ["CLI", commandOf], ["Python", pythonOf]];

/** Make the box that shows the job in each way: {element, show({text, data})}. */
export function waysBox() {
  let job = null;
  let [[, write]] = WAYS;
  const code = h("pre", { tabindex: 0, role: "region", "aria-label": "The job as a command" });
  const said = h("span", { role: "status", class: "quiet" });
  const draw = () => {
    said.textContent = "";
    code.textContent = job === null ? "The YAML must be readable first." : write(job);
  };
  const buttons = WAYS.map(([name, make]) => h("button", {
    type: "button", "aria-pressed": String(make === write),
    onclick: (event) => {
      write = make;
      for (const each of buttons) each.ariaPressed = String(each === event.target);
      draw();
    },
  }, name));
  const copy = h("button", {
    type: "button",
    onclick: async () => {
      said.textContent = (await copied(code)) ? "Copied." : "Select it and copy it.";
    },
  }, "Copy");
  const element = h("details", { class: "ways" },
    h("summary", {}, "The same job as curl, CLI or Python"),
    h("p", { class: "line" }, buttons, copy, said), code,
    h("p", { class: "quiet" },
      "It contains no key: all three read KD_API_KEY. A relative path starts in the folder of the "
      + "service; the CLI on the service's machine starts it in the folder where it is typed."));
  const show = (shown) => {
    job = shown;
    draw();
  };
  draw();
  return { element, show };
}

/** Copy the text of an element; whether that was possible. */
async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    // Browsers keep the clipboard from pages without TLS; a selection can be copied all the same.
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
