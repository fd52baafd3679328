"""The scopes that routes ask of their caller, as values for a route's ``dependencies``."""

from __future__ import annotations

from fastapi import Depends

from services.api.guards.authentication import count_validation, hold_stream, require_scope

READ = [Depends(require_scope("read"))]
WRITE = [Depends(require_scope("write"))]
ADMIN = [Depends(require_scope("admin"))]
#: Also counts as a validation, of which a caller may ask fewer.
VALIDATE = [*WRITE, Depends(count_validation)]
#: Also holds one of the caller's event streams.
STREAM = [*READ, Depends(hold_stream)]
