// The API as the pages see it: JSON in and out, errors as what the problem document says, the key from this tab.

const KEY = "potstill-key";

/** An answer that is an error; `problem` is the document. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? `The server answered ${status}.`);
    Object.assign(this, { status, problem });
  }
}

async function request(method, path, body) {
  const key = sessionStorage.getItem(KEY);
  const headers = { Accept: "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(`.${path}`, { method, headers, body, cache: "no-store" });
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

export const get = async (path) => (await request("GET", path)).json();
export const getText = async (path) => (await request("GET", path)).text();
export const post = async (path, body) => (await request("POST", path, body)).json();

/** An address of a file that an element can load, which does not carry the key: with one, the file is fetched first. */
export async function address(path) {
  if (sessionStorage.getItem(KEY) === null) return `.${path}`;
  return URL.createObjectURL(await (await request("GET", path)).blob());
}

/** Save a file. */
export async function download(path, name) {
  const href = await address(path);
  Object.assign(document.createElement("a"), { href, download: name }).click();
  if (href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

/** Ask for a key; every page that waits for one shares the question. `why` the one before did not do, if there was one. */
let asking = null;
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const form = dialog.querySelector("form");
    form.reset();
    form.querySelector(".error").textContent = sessionStorage.getItem(KEY) ? why : "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, new FormData(form).get("key").trim());
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
