"""The worker: a Celery consumer, its supervisor, and the child process that runs one stage."""
