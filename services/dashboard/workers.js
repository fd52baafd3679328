// The page of the workers: their devices and their jobs.

import { get } from "./api.js";
import { bytes, duration, fill, h, table } from "./elements.js";
import { to } from "./paths.js";

const TITLES = ["Worker", "Stages", "Device", "Memory", "Job", "Last heartbeat"];

export function workersPage() {
  const list = h("div");
  async function refresh() {
    const { data } = await get("/workers");
    const rows = data.map((worker) => [
      h("code", {}, worker.id),
      worker.stages.join(", "),
      worker.device.name,
      bytes(worker.device.memory_bytes),
      task(worker),
      worker.beat_age_seconds == null ? null : `${duration(worker.beat_age_seconds)} ago`,
    ]);
    const empty = h("p", {}, "No worker has sent a heartbeat in the last 30 seconds.");
    fill(list, rows.length ? table("Workers", TITLES, rows) : empty);
  }
  return { title: "Workers", element: h("div", {}, h("h1", {}, "Workers"), list), refresh };
}

function task({ job, busy, stopping, helping }) {
  if (job) return h("span", {}, helping && "helps ", h("a", { href: to(`/jobs/${job}`) }, job));
  return busy ? "another key's job" : stopping ? "stopping" : "idle";
}
