// What a job uses: device, memory, disk, and the time that it waits for data. All of it is in its
// metrics, in the list of workers, and in the list of its checkpoints.

import { get } from "./api.js";
import { bytes, facts, h, number, percent } from "./elements.js";

/** The metrics beside those of the charts. */
export const NAMES = ["throughput/*", "loader/*", "memory/*"];

/** The part of the page; it asks for the worker and the checkpoints only where they may be new. */
export class Resources {
  constructor(id) {
    Object.assign(this, { id, worker: null, device: null, saved: null, checkpoints: [] });
  }

  /** Return the elements. `saved` is the number of checkpoints that the job has told of. */
  async draw(job, curves, saved, files) {
    if (job.worker && job.worker !== this.worker) {
      const { data } = await get("/workers");
      this.device = data.find(({ id }) => id === job.worker)?.device ?? null;
      this.worker = job.worker;
    }
    if (saved !== this.saved) {
      this.checkpoints = (await get(`/jobs/${this.id}/checkpoints`)).data;
      this.saved = saved;
    }
    const newest = new Map((curves ?? []).map(({ name, values }) => [name, values.at(-1)]));
    const sum = (list) => list.reduce((total, each) => total + each.bytes, 0);
    const count = this.checkpoints.length;
    const pairs = [
      ["Device", this.device && describe(this.device)],
      ["Utilisation of the device (MFU)", percent(newest.get("throughput/mfu"), 1)],
      ["GPU memory of tensors", bytes(newest.get("memory/allocated_bytes"))],
      ["GPU memory of the allocator", bytes(newest.get("memory/reserved_bytes"))],
      ["Peak memory", bytes(newest.get("memory/peak_bytes"))],
      ["Memory of the process", bytes(newest.get("memory/resident_bytes"))],
      ["Waiting for data", percent(newest.get("loader/waited_share"), 1)],
      ["Steps that waited over 1 ms", percent(newest.get("loader/late_steps"), 1)],
      ["Batches in pinned memory", this.device && this.device.kind !== "cpu" && percent(newest.get("loader/pinned_share"))],
      ["Steps per second", number(newest.get("throughput/steps_per_second"), 3)],
      ...ranksOf(curves ?? []),
      ["Checkpoints on disk", count ? `${bytes(sum(this.checkpoints))} in ${count}` : null],
      ["Files on disk", files.length ? bytes(sum(files)) : null],
    ];
    if (pairs.every(([, value]) => value == null)) return null;
    return [h("h2", {}, "Resources"), facts(pairs)];
  }
}

/** How many ranks of a training each host has, and which rank is the slowest. */
function ranksOf(curves) {
  const all = curves.filter(({ name }) => name.startsWith("rank_seconds/"));
  const last = Math.max(...all.map(({ steps }) => steps.at(-1)));
  // An earlier attempt may have had other hosts.
  const now = all.filter(({ steps }) => steps.at(-1) === last)
    .map(({ name, values }) => [name.split("/")[1], values.at(-1)]).sort(([, a], [, b]) => a - b);
  if (!now.length) return [];
  const hosts = now.map(([name]) => name.split(" on ")[1]).sort();
  const countOf = (host) => `${hosts.filter((each) => each === host).length} on ${host}`;
  const [[, median], [slowest, seconds]] = [now[(now.length - 1) >> 1], now.at(-1)];
  return [
    ["Ranks", [...new Set(hosts)].map(countOf).join(", ")],
    ["Slowest rank", `${slowest}, ${number(seconds / median, 3)} times the median`],
  ];
}

function describe({ name, kind, count, memory_bytes: memory }) {
  const size = memory ? ` with ${bytes(memory)}` : "";
  return `${count > 1 ? `${count} × ` : ""}${name || kind}${size}`;
}
