"""The form of OpenAI's API for files and fine-tuning: what its clients send, and what they read."""
