// The page of the workers: their devices and their jobs.

import { bytes, duration, h, table } from "./elements.js";
import { answerPage } from "./operator.js";
import { to } from "./paths.js";

const TITLES = ["Worker", "Stages", "Device", "Memory", "Job", "Last heartbeat"];

export const workersPage = () => answerPage("/workers", "Workers", undefined, ({ data }) => {
  if (!data.length) return h("p", {}, "No worker has sent a heartbeat in the last 30 seconds.");
  return table("Workers", TITLES, data.map((worker) => [
    h("code", {}, worker.id),
    worker.stages.join(", "),
    worker.device.name,
    bytes(worker.device.memory_bytes),
    task(worker),
    worker.beat_age_seconds == null ? null : `${duration(worker.beat_age_seconds)} ago`,
  ]));
});

function task({ job, busy, stopping, helping }) {
  if (job) return h("span", {}, helping && "helps ", h("a", { href: to(`/jobs/${job}`) }, job));
  return busy ? "another key's job" : stopping ? "stopping" : "idle";
}
