// Requests to the API: they send and return JSON, raise problem documents as errors, and use the
// API key of this tab.

import { to } from "./paths.js";

const KEY = "potstill-key";

/** An error answer; `problem` is its problem document. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? `The server answered ${status}.`);
    Object.assign(this, { status, problem });
  }
}

/** Say why a request failed. */
export function reasonOf(error) {
  if (!(error instanceof Refused)) return "The server does not answer.";
  const { errors = [], remedy } = error.problem;
  return [error.message, ...errors.map(({ detail }) => detail), remedy].filter(Boolean).join(" ");
}

/** Return a function that does something, and says in `box` why it could not be done. */
export const attemptWith = (box) => async (work) => {
  box.hidden = true;
  try {
    await work();
  } catch (error) {
    box.hidden = false;
    box.textContent = reasonOf(error);
  }
};

/** Return the headers that carry the key of this tab, if it has one. */
export function keyHeaders() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(method, path, body) {
  const headers = { Accept: "application/json", ...keyHeaders() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(to(path), { method, headers, body, cache: "no-store" });
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

export const get = async (path) => (await request("GET", path)).json();
export const getText = async (path) => (await request("GET", path)).text();
export const post = async (path, body) => (await request("POST", path, body)).json();

/**
 * Return an address of a file that an element can load.
 * An element cannot send the API key, so with a key the file is fetched first.
 */
export async function address(path) {
  if (sessionStorage.getItem(KEY) === null) return to(path);
  return URL.createObjectURL(await (await request("GET", path)).blob());
}

/** Download a file. */
export async function download(path, name) {
  const href = await address(path);
  Object.assign(document.createElement("a"), { href, download: name }).click();
  if (href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

let asking = null;
/**
 * Ask the user for an API key. Requests that fail at the same time share the question.
 * `reason` says why the last key was refused; it is shown only if there was one.
 */
export function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const form = dialog.querySelector("form");
    form.reset();
    form.querySelector(".error").textContent = sessionStorage.getItem(KEY) ? reason : "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, new FormData(form).get("key").trim());
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
