"""A JSON object, as a file, a process or a client of the service has it."""

from typing import Any

#: Its names are not known here, or differ from one to the next.
Json = dict[str, Any]
