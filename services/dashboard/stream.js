// The events of a job as they happen: server-sent events, read with fetch, which can send the key.

import { keyHeaders } from "./api.js";
import { to } from "./paths.js";

const AGAIN_MS = 1000;

/**
 * Call `seen` with the type of each event of a job from now on, until the returned function is
 * called or the job has ended. A broken stream is opened again after the last event that came.
 */
export function follow(id, seen) {
  const stopping = new AbortController();
  read(id, seen, stopping.signal);
  return () => stopping.abort();
}

async function read(id, seen, signal) {
  let last = `${Date.now()}`; // an event's id begins with its time in milliseconds
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", "Last-Event-ID": last, ...keyHeaders() };
      const answer = await fetch(to(`/jobs/${id}/events/stream`), { headers, signal });
      if (!answer.ok) return; // the page's own requests say why
      for await (const event of parse(answer.body)) {
        last = event.id ?? last;
        seen(event.type);
      }
      return; // the job has ended
    } catch {
      if (signal.aborted) return;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Yield {id, type} of each event of a stream. */
async function* parse(body) {
  let text = "";
  for await (const part of body.pipeThrough(new TextDecoderStream())) {
    const events = (text + part).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const fields = new Map(event.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (fields.has("data")) yield { id: fields.get("id"), type: fields.get("event") };
    }
  }
}
