"""The science: data, teacher, losses, training, evaluation. Knows nothing of HTTP, Redis or Celery."""
