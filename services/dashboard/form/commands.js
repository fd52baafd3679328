// A job as commands of other clients: curl, the command line and Python. No key is in them.

import { keyHeaders } from "../api.js";
import { copyButton, h } from "../elements.js";
import { to } from "../paths.js";

const serverAddress = () => new URL(to("/"), location.href).href.replace(/\/$/, "");
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A here-document that ends at a word that is no line of the text. */
function hereDocument(text) {
  let word = "EOF";
  while (text.split("\n").includes(word)) word += "F";
  return `<<'${word}'\n${text.trimEnd()}\n${word}\n`;
}

const json = (data) => JSON.stringify(data, null, 2);
const COMMANDS = {
  curl: ({ data }) => {
    const key = keyHeaders().Authorization ? ` -H "Authorization: Bearer $KD_API_KEY"` : "";
    return `curl -sS ${shell(`${serverAddress()}/jobs`)} \\\n  -H 'Content-Type: application/json'${key} \\\n`
      + `  --data-binary @- ${hereDocument(json(data))}`;
  },
  CLI: ({ text }) => `cat > job.yaml ${hereDocument(text)}`
    + `kd submit job.yaml --server ${shell(serverAddress())}\n`,
  // JSON never has three quotation marks in a row.
  Python: ({ data }) => `import json\n\nimport kd\n\njob = json.loads(r"""${json(data)}""")\n`
    + `client = kd.Client(${JSON.stringify(serverAddress())})\nprint(client.submit(job).id)\n`,
};

/** Make the box that shows the job as a command: {element, show({text, data})}. */
export function commandsBox() {
  let job = null;
  const code = h("pre", { tabindex: 0, role: "region", "aria-label": "The job as a command" });
  const said = h("span", { role: "status", class: "quiet" });
  const show = (shown) => {
    job = shown;
    said.textContent = "";
    code.textContent = job ? COMMANDS[client.value](job) : "The YAML must be readable first.";
  };
  const client = h("select", { "aria-label": "Client", onchange: () => show(job) },
    Object.keys(COMMANDS).map((name) => h("option", {}, name)));
  const element = h("details", { class: "commands" },
    h("summary", {}, "The same job as curl, CLI or Python"),
    h("p", { class: "line" }, client, copyButton(() => code.textContent, said), said), code,
    h("p", { class: "quiet" },
      "It contains no key: all three read KD_API_KEY. A relative path starts in the folder of the "
      + "service; the CLI on the service's machine starts it in the folder where it is typed."));
  return { element, show };
}
