// Who works, on what, and at what.

import { get } from "./api.js";
import { bytes, duration, fill, h, table } from "./elements.js";

const HEADS = ["Worker", "Stages", "Device", "Memory", "Works on", "Last heard of"];

export function workersPage() {
  const list = h("div");
  async function refresh() {
    const { data } = await get("/workers");
    const rows = data.map((worker) => [
      h("code", {}, worker.id), worker.stages.join(", "), worker.device.name, bytes(worker.device.memory_bytes), task(worker),
      worker.beat_age_seconds == null ? null : `${duration(worker.beat_age_seconds)} ago`,
    ]);
    fill(list, rows.length ? table("Workers", HEADS, rows) : h("p", {}, "No worker has been heard of for half a minute."));
  }
  return { element: h("div", {}, h("h1", {}, "Workers"), list), refresh };
}

function task({ job, busy, stopping }) {
  if (job) return h("a", { href: `#/jobs/${job}` }, job);
  return busy ? "a job of somebody else" : stopping ? "stopping" : "idle";
}
