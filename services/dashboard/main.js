// The router: it shows the page of the address, and refreshes it while the tab is visible.

import { Refused, askForKey } from "./api.js";
import { cachePage, cachesPage } from "./caches.js";
import { h } from "./elements.js";
import { jobPage } from "./job.js";
import { jobsPage } from "./jobs.js";
import { newPage } from "./new.js";
import { workersPage } from "./workers.js";

const REFRESH_MS = 2000;
const PAGES = [
  [/^(?:#\/?)?$/, jobsPage],
  [/^#\/jobs\/([\w-]+)$/, jobPage],
  [/^#\/new(?:\?from=([\w-]+))?$/, newPage],
  [/^#\/caches$/, cachesPage],
  [/^#\/caches\/(\w+)$/, cachePage],
  [/^#\/workers$/, workersPage],
];
const root = document.getElementById("page");
const state = document.getElementById("state");
let page = null;

/**
 * Show the page of the address.
 *
 * A page is made by a function of PAGES, which gets a function that redraws the page and the parts
 * of the address. It returns {element, refresh, every?, close?}: `refresh` draws the page, and
 * returns false if it will not change again; `every` is the time between two calls, in ms.
 */
function show() {
  page?.close?.();
  const [pattern, make] = PAGES.find(([each]) => each.test(location.hash)) ?? [/$/, notFoundPage];
  const shown = make(() => refresh(shown), ...(pattern.exec(location.hash)?.slice(1) ?? []));
  page = shown;
  root.replaceChildren(page.element);
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.hash.replace(/\/$/, "") === location.hash.replace(/\/$/, "");
    link.ariaCurrent = here ? "page" : null;
  }
  refreshWhileShown(shown);
}

async function refreshWhileShown(shown) {
  while (shown === page) {
    let goesOn = true;
    if (!document.hidden) goesOn = await refresh(shown);
    if (goesOn === false) return;
    await new Promise((resolve) => setTimeout(resolve, shown.every ?? REFRESH_MS));
  }
}

/** Refresh a page, one call at a time: a second call waits for the first, then refreshes again. */
async function refresh(shown) {
  while (shown.drawing) await shown.drawing;
  shown.drawing = draw(shown);
  const goesOn = await shown.drawing;
  shown.drawing = null;
  return goesOn;
}

async function draw(shown) {
  try {
    const goesOn = await shown.refresh();
    if (shown === page) showState("");
    return goesOn;
  } catch (error) {
    if (shown !== page) return false;
    if (!(error instanceof Refused)) showState("The server does not answer; trying again.");
    else if (error.status === 401) await askForKey(error.message);
    else if (error.status === 404) return showNotFound(shown, error);
    else showState(error.message);
    return true;
  }
}

function showState(text) {
  // An unchanged text is not set again, because a screen reader would read it again.
  if (state.textContent !== text) state.textContent = text;
}

function showNotFound(shown, error) {
  shown.element.replaceChildren(...notFound(error.message));
  return false;
}

function notFoundPage() {
  return { element: h("div", {}, notFound("There is no such page.")), refresh: () => false };
}

const notFound = (message) => [
  h("h1", {}, "Not found"),
  h("p", { class: "error" }, message),
  h("p", {}, h("a", { href: "#/" }, "All jobs")),
];

addEventListener("hashchange", () => {
  show();
  root.focus();
});
show();
