"""The side that works: a Celery consumer, its supervisor, and the child that runs one stage."""
