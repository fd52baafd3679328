"""What a route asks of its caller, each as the ``dependencies`` of a route."""

from __future__ import annotations

from fastapi import Depends

from services.api.keys import hold_stream, require

READ = [Depends(require("read"))]
WRITE = [Depends(require("write"))]
STREAM = [*READ, Depends(hold_stream)]
