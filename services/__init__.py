"""The service around kd: FastAPI, Celery, Redis and the command line. No training code.

POST /jobs -> api -> store    the record in Redis: every key, state and transition (jobs.lua)
               |      ^   ^
               |beat, |   | loops: lost hints, expired leases
               v claim|
             queue -> worker -> supervisor -> stage_process -> stage_child -> kd.pipeline
             a hint   Celery    one attempt   a pipe           one stage in its own process

settings     the KD_* variables
store/       job records, the queue, API keys, backups, the bundled Redis
process/     logs, health checks, the end of orphaned processes
worker/      devices, and the processes that run stages
loops/       the reconciler, searches, webhooks
api/         routes, their answers, and their guards
terminal/    the command kd
dashboard/   the page in the browser
"""
