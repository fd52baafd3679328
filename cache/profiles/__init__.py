"""Each kind of record: what it keeps, how it is coded, and what people see of it."""
