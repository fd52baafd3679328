"""Job files to begin with, as ``kd init`` and the dashboard offer them, and how they are filled."""
