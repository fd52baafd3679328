"""Job files of other tools, turned into ours: one module for each tool."""
