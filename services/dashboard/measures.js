// The numbers by which jobs are compared: quality, and what it costs.

import { getText } from "./api.js";
import { bytes, duration, number, secondsOf } from "./elements.js";

/** {name, title, of, format}: `of` takes {job, report}; quality is lower or higher for better. */
export const QUALITY = [
  { name: "perplexity", title: "Held-out perplexity", of: ({ job }) => job.metrics.validation_perplexity },
  { name: "bits", title: "Bits per byte, held out", of: ({ job }) => job.metrics.student_bits_per_byte },
  { name: "kl", title: "KL to the teacher, nats", of: ({ job }) => job.metrics.validation_kl },
  { name: "loss", title: "Held-out loss, nats", of: ({ job }) => job.metrics.validation_loss },
  { name: "agreement", title: "Agreement with the teacher", higher: true, of: ({ job }) => job.metrics.validation_agreement },
];
const costs = (name) => ({ report }) => report?.evaluation?.costs?.student?.[name];
export const COSTS = [
  { name: "bytes", title: "Bytes per token of the cache", of: ({ job }) => job.cache?.bytes_per_token },
  { name: "parameters", title: "Parameters of the student", of: (one) => costs("parameters")(one) ?? one.report?.parameters },
  { name: "disk", title: "Size of the student on disk", of: costs("disk_bytes"), format: bytes },
  { name: "reading", title: "Reading, tokens per second", of: costs("read_tokens_per_second") },
  { name: "writing", title: "Writing, tokens per second", of: costs("write_tokens_per_second") },
  { name: "duration", title: "Duration of the job", of: ({ job }) => secondsOf(job), format: duration },
  { name: "speed", title: "Training, tokens per second", of: ({ job }) => job.progress.tokens_per_second },
  { name: "memory", title: "Peak memory", of: ({ report }) => report?.profile?.peak_memory_bytes, format: bytes },
];

/** Whether the jobs held out the same text in the same tokens, as far as they say. */
export const sameText = (jobs) => ["held_out_tokens", "held_out_bytes"].every((name) =>
  new Set(jobs.map(({ metrics }) => metrics[name]).filter(Number.isFinite)).size < 2);

/** Return those measures that at least two of the jobs have. */
export const known = (measures, all) =>
  measures.filter(({ of }) => all.filter((one) => Number.isFinite(of(one))).length > 1);

/** The qualities by which the jobs can be compared: of other texts no loss of a token is one. */
export const qualities = (all) => known(QUALITY, all)
  .filter(({ name }) => !["perplexity", "loss"].includes(name) || sameText(all.map(({ job }) => job)));

export const shown = ({ format = number }, value) => format(value);

/** Reads the reports of jobs that have ended, each once. */
export class Reports {
  constructor() {
    this.read = new Map();
  }

  /** Return {job, report} for each job; the report is null where there is none. */
  async with(jobs) {
    return Promise.all(jobs.map(async (job) => {
      const key = `${job.id} ${job.finished_at}`;
      if (job.finished_at && !this.read.has(key)) this.read.set(key, await reportOf(job));
      return { job, report: this.read.get(key) ?? null };
    }));
  }
}

async function reportOf({ id, artifacts }) {
  if (!("report.json" in artifacts)) return null;
  return JSON.parse(await getText(`/jobs/${id}/artifacts/report.json`).catch(() => "null"));
}
