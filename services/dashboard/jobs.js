// The page of all jobs, newest first, and the table of jobs.

import { get } from "./api.js";
import { bar, chip, duration, fill, h, heldOut, number, table, time } from "./elements.js";
import { keepInAddress, query, to } from "./paths.js";

const PAGE = 20;
const STATUSES = [
  "waiting", "queued", "running", "cancelling", "pausing", "paused", "succeeded", "failed",
  "cancelled",
];
const TITLES = [
  "Status", "Name", "Kind", "Stage", "Progress", "ETA", "Loss", "Held-out perplexity", "Tokens/s",
  "Created",
];

export function jobsPage(redraw) {
  let wanted = PAGE;
  const list = h("div");
  const showMore = () => {
    wanted += PAGE;
    redraw();
  };
  const more = h("button", { type: "button", hidden: true, onclick: showMore }, "Older jobs");
  const filter = () => {
    keepInAddress({ status: status.value });
    redraw();
  };
  const status = h("select", { onchange: filter },
    h("option", { value: "" }, "any status"),
    STATUSES.map((name) => h("option", { value: name }, name)));
  status.value = query().get("status") ?? "";
  const element = h("div", {},
    h("div", { class: "title" },
      h("h1", {}, "Jobs"),
      h("label", {}, h("span", { class: "hidden" }, "Status "), status)),
    list, more);

  async function refresh() {
    const [jobs, cursor] = await newest(wanted, { status: status.value });
    more.hidden = cursor === null;
    fill(list, jobs.length ? jobTable("Jobs", jobs) : nothing(status.value));
  }
  return { title: "Jobs", element, refresh };
}

export const jobTable = (caption, jobs) => table(caption, TITLES, jobs.map(row));

/**
 * Read up to `count` jobs, newest first; return them and the cursor of the next ones.
 * A page of the API may be short although more jobs follow, so pages are read until it is enough.
 */
export async function newest(count, filters) {
  let jobs = [];
  let cursor = "";
  while (jobs.length < count && cursor !== null) {
    const known = Object.entries({ ...filters, cursor }).filter(([, value]) => value);
    const limit = Math.min(count - jobs.length, 100);
    const query = new URLSearchParams([["limit", limit], ...known]);
    const page = await get(`/jobs?${query}`);
    jobs = jobs.concat(page.data);
    cursor = page.next_cursor;
  }
  return [jobs, cursor];
}

function row(job) {
  const { progress, metrics } = job;
  const runs = job.status === "running";
  return [
    chip(job.status),
    h("a", { href: to(`/jobs/${job.id}`) }, job.name),
    job.kind,
    runs && job.phase ? `${job.stage} · ${job.phase}` : job.stage,
    bar(progress),
    runs ? duration(progress.eta_seconds) : null,
    number(metrics.loss),
    heldOut(metrics),
    runs ? number(progress.tokens_per_second, 3) : null,
    time(job.created_at),
  ];
}

function nothing(status) {
  if (status) return h("p", {}, `No job is ${status}.`);
  return h("p", {},
    "There are no jobs yet. ", h("a", { href: to("/new") }, "Create one"), ", or run ",
    h("code", {}, "kd submit job.yaml"), ".");
}
