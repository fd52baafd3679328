// The events of a job as they happen: server-sent events, read with fetch, which can send the key.

import { get, keyHeaders } from "./api.js";
import { to } from "./paths.js";

const AGAIN_MS = 1000;

/**
 * Call `seen` for each event of a job from now on, with its {id, type, data}, until the returned
 * function is called or the job has ended. A broken stream is opened again after the last event
 * that came, so that none is missed or comes twice. `seen` is called without an event for each
 * opening, because what came before it may not be known. A hidden page has no stream: a browser has
 * six connections to a server for all its pages, and would answer none of them.
 */
export function follow(id, seen) {
  const stopping = new AbortController();
  read(id, seen, stopping.signal);
  return () => stopping.abort();
}

async function read(id, seen, signal) {
  let last = null;
  let hidden = AbortSignal.abort();
  while (!signal.aborted) {
    if (hidden.aborted) hidden = await shown();
    try {
      const headers = { Accept: "text/event-stream", ...keyHeaders() };
      if (last !== null) headers["Last-Event-ID"] = last;
      const path = `/jobs/${id}/events/stream?new_only=true`;
      const both = AbortSignal.any([signal, hidden]);
      const answer = await fetch(to(path), { headers, signal: both });
      // The page's own requests say why; a server that starts, or is busy, may answer later.
      if (!answer.ok && answer.status < 500 && answer.status !== 429) return;
      if (answer.ok) {
        seen();
        for await (const event of parse(answer.body)) {
          last = event.id ?? last;
          seen(event);
        }
        // A stream also ends where the server stops; then this request fails, or the job goes on.
        if ((await get(`/jobs/${id}`)).finished_at) return;
      }
    } catch {
      if (signal.aborted) return;
      if (hidden.aborted) continue;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Wait until the page is shown; return a signal of the moment when it is hidden again. */
function shown() {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return document.addEventListener("visibilitychange", look, { once: true });
      const hiding = new AbortController();
      document.addEventListener("visibilitychange", () => hiding.abort(), { once: true });
      resolve(hiding.signal);
    };
    look();
  });
}

/** Yield {id, type, data} of each whole event of a stream. */
async function* parse(body) {
  let text = "";
  for await (const part of body.pipeThrough(new TextDecoderStream())) {
    const events = (text + part).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const fields = new Map(event.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (!fields.has("data")) continue;
      yield { id: fields.get("id"), type: fields.get("event"), data: JSON.parse(fields.get("data")) };
    }
  }
}
