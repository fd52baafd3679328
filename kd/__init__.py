"""The science: data, teacher, losses, training, evaluation.

It knows nothing of HTTP, Redis or Celery.
"""
