"""The doors: FastAPI, Celery, Redis, command line. Thin; no training code.

POST /jobs -> api -> jobs.py, jobs.lua    the record in Redis: every key, state and transition
               |         ^   ^
               |   beat, |   | reconciler: lost hints, leases that ran out
               v   claim |
             queue -> worker -> supervisor -> process -> child -> kd.pipeline
             a hint   Celery    one attempt   (pipe)     a stage, in a process of its own

events       a job's stream as server-sent events      problems     every error as a problem document
schemas      what the API answers                      settings     KD_* variables
embedded     the Redis that comes along                health       checks for containers
cli          the command kd; its parts in terminal/    lifeline     nothing outlives its parent
"""
