"""The doors: FastAPI, Celery, Redis, command line. Thin; no training code.

POST /jobs -> api -> jobs.py, jobs.lua    the record in Redis: every key, state and transition
               |         ^   ^
               |   beat, |   | reconciler: lost hints, leases that ran out
               v   claim |
             queue -> worker -> supervisor -> process -> child -> kd.pipeline
             a hint   Celery    one attempt   (pipe)     a stage, in a process of its own

api/         the routes, and what guards them            worker/      devices, processes, what became of them
jobs.lua     every state and every way between them     schemas      a job, as the API shows it
queue        Celery, as a channel of hints              reconciler   mends what a crash left behind
search       a search, whose trials are jobs            webhooks     tells the world of a job's changes
keys         the file of API keys                       tenancy      what a job of whom may name
backup       everything in one folder, and back
settings     KD_* variables                             logs, telemetry   what is told of all this
embedded     the Redis that comes along                 health, lifeline  who is alive, who must not outlive whom
cli          the command kd; its parts in terminal/
"""
