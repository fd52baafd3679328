// Which page is shown, and its breath: every page is drawn by its `refresh`, again and again while somebody looks.

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
 * Show the page of the address. A page is made with what draws it anew and the parts of its address; it is {element,
 * refresh, every?, close?}. Where its refresh returns false, nothing will change any more.
 */
function show() {
  page?.close?.();
  const [pattern, make] = PAGES.find(([each]) => each.test(location.hash)) ?? [/$/, nowhere];
  const shown = make(() => refresh(shown), ...(pattern.exec(location.hash)?.slice(1) ?? []));
  page = shown;
  root.replaceChildren(page.element);
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.hash.replace(/\/$/, "") === location.hash.replace(/\/$/, "");
    link.ariaCurrent = here ? "page" : null;
  }
  breathe(shown);
}

async function breathe(shown) {
  while (shown === page) {
    let goesOn = true;
    if (!document.hidden) goesOn = await refresh(shown);
    if (goesOn === false) return;
    await new Promise((resolve) => setTimeout(resolve, shown.every ?? REFRESH_MS));
  }
}

/** One at a time: who asks meanwhile waits for the one under way, and then for one of its own. */
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
    if (shown === page) tell("");
    return goesOn;
  } catch (error) {
    if (shown !== page) return false;
    if (!(error instanceof Refused)) tell("The server does not answer; trying again.");
    else if (error.status === 401) await askForKey(error.message);
    else if (error.status === 404) return gone(shown, error);
    else tell(error.message);
    return true;
  }
}

function tell(text) {
  if (state.textContent !== text) state.textContent = text;
}

function gone(shown, error) {
  shown.element.replaceChildren(...lost(error.message));
  return false;
}

function nowhere() {
  return { element: h("div", {}, lost("There is no such page.")), refresh: () => false };
}

const lost = (why) => [h("h1", {}, "Not found"), h("p", { class: "error" }, why), h("p", {}, h("a", { href: "#/" }, "All jobs"))];

addEventListener("hashchange", () => {
  show();
  root.focus();
});
show();
