"""Settings of a training for given devices: `kd plan` and the plan of `POST /jobs/validate`."""
