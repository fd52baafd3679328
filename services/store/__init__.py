"""The job record in Redis, and everything else the service keeps."""
