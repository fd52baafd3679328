// The router: it shows the page of the address, and refreshes it while the tab is visible.

import { Refused, askForKey } from "./api.js";
import { cachePage } from "./cache.js";
import { cachesPage } from "./caches.js";
import { comparePage } from "./compare.js";
import { h } from "./elements.js";
import { jobPage } from "./job.js";
import { jobsPage } from "./jobs.js";
import { newPage } from "./new.js";
import { healthPage, keysPage, storagePage } from "./operator.js";
import { here, to } from "./paths.js";
import { tokensPage } from "./tokens.js";
import { workersPage } from "./workers.js";

const REFRESH_MS = 2000;
// routes/dashboard.py has the same paths.
const PAGES = [
  [/^\/(?:jobs)?$/, jobsPage],
  [/^\/jobs\/([\w-]+)$/, jobPage],
  [/^\/compare$/, comparePage],
  [/^\/new$/, newPage],
  [/^\/caches$/, cachesPage],
  [/^\/caches\/(\w+)$/, cachePage],
  [/^\/tokens$/, tokensPage],
  [/^\/workers$/, workersPage],
  [/^\/keys$/, keysPage],
  [/^\/storage$/, storagePage],
  [/^\/health$/, healthPage],
];
const root = document.getElementById("page");
const state = document.getElementById("state");
let page = null;

/**
 * Show the page of the address.
 *
 * A page is made by a function of PAGES, which gets a function that redraws the page and the parts
 * of the address. It returns {title, element, refresh, every?, close?}: `refresh` draws the page,
 * and returns false if it will not change again; `every` is the time between two calls, in ms.
 */
function show() {
  page?.close?.();
  const path = here();
  const [pattern, make] = PAGES.find(([each]) => each.test(path)) ?? [/$/, notFoundPage];
  const shown = make(() => refresh(shown), ...(pattern.exec(path)?.slice(1) ?? []));
  page = shown;
  root.replaceChildren(page.element);
  document.title = `${page.title} · Potstill`;
  for (const link of document.querySelectorAll("nav a")) {
    const shows = link.pathname === to(path === "/" ? "/jobs" : path);
    link.ariaCurrent = shows ? "page" : null;
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
    if (shown !== page) return false;
    document.title = `${page.title} · Potstill`;
    showState("");
    return goesOn;
  } catch (error) {
    if (shown !== page) return false;
    if (!(error instanceof Refused)) showState("The server does not answer; trying again.");
    else if (error.status === 401) await askForKey(error.message);
    else if (error.status === 404) return showNotFound(shown.element, error.message);
    else showState(error.message);
    return true;
  }
}

function showState(text) {
  // An unchanged text is not set again, because a screen reader would read it again.
  if (state.textContent !== text) state.textContent = text;
}

function showNotFound(element, message) {
  element.replaceChildren(
    h("h1", {}, "Not found"),
    h("p", { class: "error" }, message),
    h("p", {}, h("a", { href: to("/jobs") }, "All jobs")));
  return false;
}

function notFoundPage() {
  const element = h("div");
  const refresh = () => showNotFound(element, "There is no such page.");
  return { title: "Not found", element, refresh };
}

addEventListener("popstate", () => {
  show();
  root.focus();
});
// A link to another page shows it without a request; with a modifier key the browser opens it.
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  const plain = event.button === 0
    && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  if (!link || !plain || link.target || link.origin !== location.origin) return;
  const path = `/${link.pathname.slice(to("").length)}`;
  if (link.download || !PAGES.some(([each]) => each.test(path))) return;
  event.preventDefault();
  history.pushState(null, "", link.href);
  show();
  scrollTo(0, 0);
  root.focus();
});
// The address changes without a new page, and with it the place where a relative link leads.
for (const link of document.querySelectorAll("header a")) link.setAttribute("href", link.href);
// Addresses of before: #/jobs/ID.
if (location.hash.startsWith("#/")) {
  history.replaceState(null, "", to(location.hash.slice(1)));
}
show();
