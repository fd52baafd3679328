"""Which job may go on from a checkpoint, and how a finished run goes on."""
