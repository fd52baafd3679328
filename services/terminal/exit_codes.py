"""The exit codes of ``kd``, as docs/operations.md describes them."""

#: The command failed, or what it looked at is not as it should be.
FAILED = 1
#: The job or the command line is not valid.
INVALID = 2
#: The service does not answer.
UNREACHABLE = 3
#: The verification found damage in a cache.
UNVERIFIED = 4
